"""A download that goes well, and one that is not needed."""

from __future__ import annotations

from support import REPO, Place, same_files


def test_a_model_is_fetched_whole_and_only_what_a_server_needs(here: Place) -> None:
    folder = here.fetch()
    assert folder.revision == here.hub.commit
    assert same_files(folder.path, here.hub.folder)
    assert not (folder.path / "pytorch_model.bin").exists()
    assert not (folder.path / "README.md").exists()
    last = here.seen[-1]
    assert last.total is not None
    assert last.done == last.total
    assert {f.name for f in last.files} >= {"config.json", "model-00001-of-00002.safetensors"}


def test_a_whole_model_makes_no_request_and_starts_no_child(here: Place) -> None:
    here.fetch()
    here.hub.log.write_text("")
    here.seen.clear()
    assert here.fetch().model_id == REPO
    assert here.hub.requests() == []
    assert here.seen == []
