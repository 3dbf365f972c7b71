"""The manifest and its cross-checks: values in, values out."""

from __future__ import annotations

import json

import pytest

from bwd.core import manifest, model_files
from bwd.core.manifest import Entry, Manifest, Stamp
from bwd.errors import WeightsError

A, B = "a" * 64, "b" * 64
WHOLE = Manifest(
    "acme/m",
    "c" * 40,
    "hub",
    (Entry("x.safetensors", 100, A), Entry("config.json", 5, None, "d" * 40)),
    {"k": "v"},
)


def test_a_manifest_is_read_as_it_was_written() -> None:
    assert manifest.parse(WHOLE.dump(), "here") == WHOLE
    assert WHOLE.size == 105


def changed(**changes: object) -> str:
    data = json.loads(WHOLE.dump())
    data["files"][0].update(changes)
    return json.dumps(data)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        json.dumps({"format": 2, "files": []}),
        json.dumps({"format": 1, "files": [3]}),
        changed(size=-1),
        changed(size=True),
        changed(size="100"),
        changed(sha256="A" * 64),
        changed(sha256=A[:-1]),
        changed(path="config.json"),
        *(changed(path=p) for p in ("", "/etc/passwd", "../x", "a/../../x", "a//b", "./a", "a\\b", "a\0b")),
        *(changed(path=p) for p in (manifest.MANIFEST, manifest.VERIFIED, "x.partial")),
    ],
)
def test_what_is_no_manifest_is_refused_with_its_place(text: str) -> None:
    with pytest.raises(WeightsError, match=r"^here: not a manifest"):
        manifest.parse(text, "here")


def test_what_is_missing_is_named_with_both_sizes() -> None:
    assert manifest.missing(WHOLE, {"x.safetensors": 100, "config.json": 5, "more": 1}) == ()
    assert manifest.missing(WHOLE, {"x.safetensors": 99}) == (
        "x.safetensors has 99 bytes instead of 100",
        "config.json is missing",
    )


@pytest.mark.parametrize(
    ("sizes", "partial", "needed"),
    [
        ({}, {}, 105),
        ({"x.safetensors": 100}, {}, 5),
        ({}, {"x.safetensors": 60}, 45),
        ({"x.safetensors": 99}, {}, 105),
        ({}, {"x.safetensors": 1000}, 5),
        ({"x.safetensors": 100, "config.json": 5}, {}, 0),
    ],
)
def test_the_space_needed_counts_what_is_there(
    sizes: dict[str, int], partial: dict[str, int], needed: int
) -> None:
    assert manifest.space_needed(WHOLE, sizes, partial) == needed


SEEN = {"x.safetensors": Stamp(100, 7, 8, A), "config.json": Stamp(5, 7, 9, B)}
NOW = {"x.safetensors": (100, 7, 8), "config.json": (5, 7, 9)}


@pytest.mark.parametrize(
    ("stamps", "now", "due"),
    [
        (SEEN, NOW, []),
        ({}, NOW, ["x.safetensors", "config.json"]),
        (SEEN, {**NOW, "x.safetensors": (100, 8, 8)}, ["x.safetensors"]),
        (SEEN, {**NOW, "x.safetensors": (101, 7, 8)}, ["x.safetensors"]),
        (SEEN, {**NOW, "x.safetensors": (100, 7, 80)}, ["x.safetensors"]),
        (SEEN, {"config.json": (5, 7, 9)}, ["x.safetensors"]),
        ({**SEEN, "x.safetensors": Stamp(100, 7, 8, B)}, NOW, ["x.safetensors"]),
    ],
)
def test_a_file_is_hashed_again_when_anything_of_it_changed(
    stamps: dict[str, Stamp], now: dict[str, tuple[int, int, int]], due: list[str]
) -> None:
    assert [entry.path for entry in manifest.unverified(WHOLE, stamps, now)] == due


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": 3}', '{"a": ["x", 1, 2, "h"]}', "null"])
def test_notes_of_hashes_that_cannot_be_read_mean_nothing_was_hashed(text: str) -> None:
    assert manifest.parse_stamps(text) == {}


def test_notes_of_hashes_are_read_as_they_were_written() -> None:
    assert manifest.parse_stamps(manifest.dump_stamps(SEEN)) == SEEN


def test_a_hash_that_the_hub_did_not_give_is_learned_and_one_that_it_gave_is_kept() -> None:
    learned = manifest.with_hashes(WHOLE, {"x.safetensors": B, "config.json": B})
    assert [entry.sha256 for entry in learned.files] == [A, B]


def test_a_header_tells_the_size_of_its_file() -> None:
    data = {"__metadata__": {"format": "pt"}, "a": {"data_offsets": [0, 8]}, "b": {"data_offsets": [8, 40]}}
    assert model_files.header(100, data) == model_files.Header(frozenset({"a", "b"}), 148)
    assert model_files.header(2, {}).size == 10


@pytest.mark.parametrize(
    "data", [[], {"a": 1}, {"a": {"data_offsets": [1]}}, {"a": {"data_offsets": ["0", "1"]}}]
)
def test_a_header_that_makes_no_sense_is_refused(data: object) -> None:
    with pytest.raises(ValueError, match="its header"):
        model_files.header(2, data)


def test_the_index_is_held_against_the_files() -> None:
    heads = {"1.st": model_files.Header(frozenset({"a"}), 10)}
    index = {"weight_map": {"a": "1.st", "b": "2.st"}}
    assert model_files.index_problems({"weight_map": {"a": "1.st"}}, {"1.st": 10}, heads) == []
    assert "1 of 2 weight files" in model_files.index_problems(index, {"1.st": 10}, heads)[0]
    lost = model_files.index_problems({"weight_map": {"a": "1.st", "z": "1.st"}}, {"1.st": 10}, heads)
    assert lost == ["1.st lacks 1 tensors that model.safetensors.index.json places there: z"]
    for broken in ([], {}, {"weight_map": []}, {"weight_map": {"a": 1}}):
        assert "has no weight_map" in model_files.index_problems(broken, {}, {})[0]


@pytest.mark.parametrize(
    ("config", "said", "args", "wrong"),
    [
        ({}, "auto", (), False),
        ({"quantization_config": {"quant_method": "awq"}}, "auto", (), False),
        ({"quantization_config": {"quant_method": "awq"}}, "awq", (), False),
        ({"quantization_config": {"quant_method": "awq"}}, "awq_marlin", (), False),
        ({"quantization_config": {"quant_method": "awq"}}, "gptq", (), True),
        ({"quantization_config": {"quant_method": "awq"}}, "auto", ("--quantization=fp8",), True),
        ({"quantization_config": {"quant_method": "awq"}}, "auto", ("-q", "awq"), False),
        ({}, "awq", (), True),
        ({}, "fp8", (), False),  # vLLM quantises at load
    ],
)
def test_the_quantisation_of_the_settings_against_the_weights(
    config: dict[str, object], said: str, args: tuple[str, ...], wrong: bool
) -> None:
    assert (model_files.quantisation_problem(config, said, args) is not None) is wrong
