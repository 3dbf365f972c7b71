"""`.env` is edited while an engine serves, with the real front before it."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.daemon.house import ROOT, RUNNER, House, free_port
from tests.fakes.engine import HEALTHY

pytestmark = pytest.mark.e2e


def _stream(port: int, tokens: int, key: str = "") -> tuple[int, list[str]]:
    """Status and lines of one streamed completion through front."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    body = json.dumps({"model": "fake", "prompt": "x", "max_tokens": tokens, "stream": True})
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    connection.request("POST", "/v1/completions", body, headers)
    answer = connection.getresponse()
    lines = [line for line in answer.read().decode().splitlines() if line]
    connection.close()
    return answer.status, lines


def _listening(house: House) -> None:
    house.until(lambda s: (s["front"] or {}).get("listening") == f"127.0.0.1:{house.port}")


def test_a_restart_waits_for_the_streams_in_flight(house: House) -> None:
    house.play({"delay": 0.05})
    house.start_front()
    house.start()
    first = house.ready()
    _listening(house)
    results: list[tuple[int, list[str]]] = []
    reader = threading.Thread(target=lambda: results.append(_stream(house.port, 40)))
    reader.start()
    house.until(lambda s: s["front"]["in_flight"] == 1)
    house.write_env("MAX_NUM_SEQS=2")
    status = house.ready(first["run"]["number"] + 1)
    reader.join(30)
    assert results[0][0] == 200
    assert results[0][1][-1] == "data: [DONE]"
    assert status["restarts_total"] == 0
    assert _stream(house.port, 2)[0] == 200


def test_what_changes_nothing_and_what_is_refused_leave_the_engine_alone(house: House) -> None:
    house.start()
    first = house.ready()
    house.env_file.write_text(house.env_file.read_text() + "# only a comment\n")
    house.env_file.touch()
    house.env_file.chmod(0o640)
    time.sleep(2.5)
    assert house.history() == ["started", "ready"]
    house.write_env("MAX_NUM_SEQS=many", "MAX_NUM_SEKS=3")
    status = house.until(lambda s: len(s["settings"]["problems"]) == 2)
    assert any("MAX_NUM_SEQS" in line and "env:8" in line for line in status["settings"]["problems"])
    assert status["phase"] == "ready"
    house.write_env()
    status = house.until(lambda s: not s["settings"]["problems"])
    assert status["run"]["id"] == first["run"]["id"]
    assert "settings refused" in house.history()
    draft = house.folder / "draft"
    draft.write_text(house.env_file.read_text() + "MAX_NUM_SEQS=2\n")
    answer = house.post("/reload", {"check": True, "file": str(draft)})
    assert (answer["change"], answer["keys"], answer["problems"]) == ("restart", ["MAX_NUM_SEQS"], [])
    assert house.status()["run"]["id"] == first["run"]["id"]


def test_port_and_key_change_without_a_restart(house: House) -> None:
    house.start_front()
    house.start()
    first = house.ready()
    _listening(house)
    house.port = free_port()
    house.write_env("API_KEY=sesame-street")
    _listening(house)
    assert house.status()["run"]["id"] == first["run"]["id"]
    assert _stream(house.port, 2)[0] == 401
    assert _stream(house.port, 2, "sesame-street")[0] == 200
    assert "sesame-street" not in house.said() + (house.state / "history.jsonl").read_text()


def test_an_edit_that_only_the_start_can_refuse_is_rolled_back(house: House) -> None:
    refused = {"raw": "vllm: error: unrecognized arguments: --no-such-flag 1\n"}
    house.play({}, {"start": [*HEALTHY[:3], refused, {"exit": 2}]}, {})
    house.start()
    first = house.ready()
    house.write_env("MAX_NUM_SEQS=2")
    status = house.ready(3)
    assert status["run"]["plan"] == first["run"]["plan"]
    assert "--no-such-flag" in status["rolled_back"]["text"]
    assert "rolled back" in house.history()


def test_stop_and_start_of_the_engine_by_hand(house: House) -> None:
    house.start()
    house.ready()
    house.post("/stop-engine", {"drain": True})
    house.until(lambda s: s["phase"] == "stopped" and not s["wanted"])
    assert not house.engine_processes()
    house.post("/start")
    house.ready(2)
    house.post("/restart")
    assert house.ready(3)["restarts_total"] == 0


def test_settings_that_are_wrong_from_the_start_are_fatal_until_they_are_mended(house: House) -> None:
    house.write_env("PORT=none")
    house.start()
    status = house.until(lambda s: s["phase"] == "fatal")
    assert "env:8" in status["cause"]["where"]
    house.write_env()
    house.until(lambda s: s["phase"] == "ready")


def test_a_port_that_a_stranger_holds_is_waited_for_and_its_owner_named(house: House) -> None:
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", house.port))
        stranger.listen()
        house.start({"policy": {"held_limit": 60.0}})
        status = house.until(lambda s: s["phase"] == "backoff")
        assert f"port {house.port} is held by" in status["cause"]["text"]
        assert "pid" in status["cause"]["text"]
        assert "started" not in house.history()
    house.ready()


# ---------------------------------------------------------------------- what is live is applied
def test_every_live_key_takes_effect_without_a_restart(house: House) -> None:
    house.start_front()
    house.start()
    first = house.ready()
    _listening(house)
    house.write_env("DRAIN_SECONDS=4.5", "HOLD_SECONDS=1.5", "CANARY_SECONDS=7", "MAX_JOBS=1")
    status = house.until(lambda s: s["settings"]["live"]["DRAIN_SECONDS"] == 4.5)
    assert status["settings"]["live"] == {"DRAIN_SECONDS": 4.5, "HOLD_SECONDS": 1.5, "CANARY_SECONDS": 7.0}
    assert status["settings"]["changed"]["kind"] == "live"
    assert "DRAIN_SECONDS (" in status["settings"]["changed"]["keys"]
    house.write_env("DRAIN_SECONDS=4.5", "HOLD_SECONDS=1.5", "CANARY_SECONDS=7", "HOST=127.0.0.2")
    house.until(lambda s: (s["front"] or {}).get("listening") == f"127.0.0.2:{house.port}")
    house.until(lambda s: s["prep"]["phase"] == "none")
    assert house.status()["run"]["id"] == first["run"]["id"]
    assert "settings changed" not in house.history()
    held = _front_gate(house)
    assert held["hold_seconds"] == 1.5


def _front_gate(house: House) -> dict[str, object]:
    from tests.daemon.house import ask

    return dict(ask(house.state / "run" / "front.sock", "GET", "/stats")["gate"])


def test_a_stream_outlives_a_change_of_the_port_and_the_key(house: House) -> None:
    house.play({"delay": 0.05})
    house.start_front()
    house.start()
    house.ready()
    _listening(house)
    results: list[tuple[int, list[str]]] = []
    old = house.port
    reader = threading.Thread(target=lambda: results.append(_stream(old, 100)))
    reader.start()
    house.until(lambda s: s["front"]["in_flight"] == 1)
    house.port = free_port()
    house.write_env("API_KEY=sesame-street")
    _listening(house)
    reader.join(30)
    assert (results[0][0], results[0][1][-1]) == (200, "data: [DONE]")


def test_a_new_port_that_somebody_holds_is_told_and_the_old_one_stays(house: House) -> None:
    house.start_front()
    house.start()
    house.ready()
    _listening(house)
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        taken = stranger.getsockname()[1]
        # Asked of a draft: of .env itself it is a race with the watch, which may have taken it already
        draft = house.folder / "draft"
        draft.write_text(house.env_file.read_text() + f"PORT={taken}\n")
        checked = house.post("/reload", {"check": True, "file": str(draft)})
        assert checked["change"] == "refused"
        assert f"port {taken} is held by" in checked["problems"][0]
        os.replace(draft, house.env_file)
        house.until(lambda s: f"{taken}" in (s["front"] or {}).get("why", ""))
        assert _stream(house.port, 2)[0] == 200
    _listening_at = f"127.0.0.1:{taken}"
    house.until(lambda s: (s["front"] or {}).get("listening") == _listening_at)


def test_a_live_key_wakes_a_preparation_that_was_refused(house: House) -> None:
    """The edit that was refused may need just that key: a token for the download, say."""
    house.start()
    house.ready()
    house.write_env("MODEL=/no/such/folder")
    house.until(lambda s: s["prep"]["phase"] == "failed")
    house.write_env("MODEL=/no/such/folder", "HF_ENDPOINT=https://mirror.example")
    deadline = time.monotonic() + 10
    while house.history().count("refused") < 2:
        assert time.monotonic() < deadline, house.history()
        time.sleep(0.1)
    assert house.status()["phase"] == "ready"


# ---------------------------------------------------------------------- what a restart goes through
def test_two_edits_make_one_restart_and_one_during_it_is_taken(house: House) -> None:
    house.play({"delay": 0.05}, {})
    house.start_front()
    house.start()
    house.ready()
    _listening(house)
    reader = threading.Thread(target=lambda: _stream(house.port, 160))
    reader.start()
    house.until(lambda s: s["front"]["in_flight"] == 1)
    house.write_env("DRAIN_SECONDS=20", "MAX_NUM_SEQS=2")
    time.sleep(0.3)
    house.write_env("DRAIN_SECONDS=20", "MAX_NUM_SEQS=3")
    house.until(lambda s: s["phase"] == "draining")
    house.write_env("DRAIN_SECONDS=20", "MAX_NUM_SEQS=4")
    reader.join(30)
    status = house.ready(2)
    assert "--max-num-seqs 4" in " ".join(_argv(status))
    assert house.history().count("started") == 2


def _argv(status: dict[str, object]) -> list[str]:
    pid = status["run"]["pid"]  # type: ignore[index]
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")


def test_an_edit_taken_back_while_it_drains_touches_nothing(house: House) -> None:
    house.play({"delay": 0.05})
    house.start_front()
    house.start()
    first = house.ready()
    _listening(house)
    results: list[tuple[int, list[str]]] = []
    reader = threading.Thread(target=lambda: results.append(_stream(house.port, 100)))
    reader.start()
    house.until(lambda s: s["front"]["in_flight"] == 1)
    house.write_env("DRAIN_SECONDS=20", "MAX_NUM_SEQS=2")
    house.until(lambda s: s["phase"] == "draining")
    house.write_env("DRAIN_SECONDS=20")
    status = house.until(lambda s: s["phase"] == "ready")
    assert status["run"]["id"] == first["run"]["id"]
    assert _stream(house.port, 2)[0] == 200
    reader.join(30)
    assert results[0][1][-1] == "data: [DONE]"


def test_a_roll_back_names_cause_key_and_line_in_status_history_and_log(house: House) -> None:
    refused = {"raw": "vllm: error: unrecognized arguments: --no-such-flag 1\n"}
    house.play({}, {"start": [*HEALTHY[:3], refused, {"exit": 2}]}, {})
    house.start()
    house.ready()
    house.write_env("MAX_NUM_SEQS=2")
    status = house.ready(3)
    where = f"MAX_NUM_SEQS ({house.env_file}:8)"
    assert status["rolled_back"]["keys"] == where
    (entry,) = [e for e in house.events() if e["what"] == "rolled back"]
    assert entry["keys"] == where
    assert "--no-such-flag" in entry["cause"]["line"]
    (line,) = [line for line in house.said().splitlines() if " rolled back " in line]
    assert where in line
    assert "--no-such-flag" in line
    house.post("/reload", {"check": False})  # asked for by a person: .env is tried again
    house.until(lambda s: s["run"]["number"] > 3)


# ---------------------------------------------------------------------- reload --check
def test_check_names_what_would_change_and_what_a_shell_hides(house: House) -> None:
    house.start(MAX_NUM_SEQS="3")
    first = house.ready()
    draft = house.folder / "draft"
    base = house.env_file.read_text()

    def check(*lines: str) -> dict[str, object]:
        draft.write_text(base + "\n".join(lines) + "\n")
        return house.post("/reload", {"check": True, "file": str(draft)})

    assert check("# a comment")["change"] == "none"
    assert check("HOLD_SECONDS=3")["change"] == "live"
    answer = check("MAX_MODEL_LEN=1024")
    assert (answer["change"], answer["keys"]) == ("restart", ["MAX_MODEL_LEN"])
    assert "--max-model-len: 4096 -> 1024" in answer["notes"]  # type: ignore[operator]
    refused = check("MAX_MODEL_LEN=9000")
    assert refused["change"] == "refused"
    assert f"{draft}:8 MAX_MODEL_LEN: 9000 is more than the model's 4096" in str(refused["problems"])
    hidden = check("MAX_NUM_SEQS=2")
    assert hidden["change"] == "none"
    assert "MAX_NUM_SEQS is set in the process environment" in str(hidden["notes"])
    assert house.status()["run"]["id"] == first["run"]["id"]
    assert house.env_file.read_text() == base


# ---------------------------------------------------------------------- bad input
def _large(path: Path) -> None:
    path.write_text("# x\n" * (10 << 18))


def _dangling(path: Path) -> None:
    path.symlink_to("nowhere")


def _utf16(path: Path) -> None:
    path.write_text("PORT=1\n", "utf-16")


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "10 MB": (_large, "larger than"),
    "a folder": (Path.mkdir, "a folder, not a file"),
    "a pipe": (os.mkfifo, "a named pipe, not a file"),
    "a dangling link": (_dangling, "a link to nowhere, which is not there"),
    "gone": (lambda path: None, "the file is gone"),
    "empty": (Path.touch, "the file is empty"),
    "UTF-16": (_utf16, "UTF-16"),
    "binary": (lambda path: path.write_bytes(b"\x7fELF\0\0" * 9), ""),
}


def test_a_file_that_is_none_is_one_line_and_the_last_good_settings_stay(house: House) -> None:
    house.start()
    first = house.ready()
    good = house.env_file.read_text()
    for name, (make, said) in BAD.items():
        _remove(house.env_file)
        make(house.env_file)
        status = house.until(lambda s: s["settings"]["problems"])
        (line,) = status["settings"]["problems"]
        assert said in line, name
        assert str(house.env_file) in line, name
        assert "\n" not in line
        assert len(line) < 300, name
        assert status["phase"] == "ready"
        _remove(house.env_file)
        house.env_file.write_text(good)
        house.until(lambda s: not s["settings"]["problems"])
    assert house.status()["run"]["id"] == first["run"]["id"]
    assert house.history().count("settings refused") == len(BAD)
    assert house.history().count("started") == 1


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    else:
        path.unlink(missing_ok=True)


def test_no_permission_is_one_line_and_the_last_good_settings_stay(house: House) -> None:
    """root reads everything unless it gives up the right to: setpriv does that for the daemon."""
    argv = [sys.executable, str(RUNNER), "{}"]
    if os.geteuid() == 0:
        rights = "-dac_override,-dac_read_search"
        setpriv = ["setpriv", f"--bounding-set={rights}", f"--inh-caps={rights}"]
        if shutil.which("setpriv") is None or subprocess.run([*setpriv, "true"], check=False).returncode:
            pytest.skip("root may read every file, and setpriv cannot take that right away here")
        argv = [*setpriv, *argv]
    house.daemon = house.launch(argv, "bwd")
    first = house.ready()
    house.env_file.chmod(0)
    status = house.until(lambda s: s["settings"]["problems"])
    assert status["settings"]["problems"] == [
        f"{house.env_file}: no permission to read it. Run chmod u+r {house.env_file}"
    ]
    assert status["phase"] == "ready"
    house.env_file.chmod(0o600)
    status = house.until(lambda s: not s["settings"]["problems"])
    assert status["run"]["id"] == first["run"]["id"]
    assert house.history() == ["started", "ready", "settings refused", "settings as before"]


# ---------------------------------------------------------------------- bwd comes up to a broken .env
def test_an_adopted_engine_is_drained_whole_although_the_settings_are_broken(house: House) -> None:
    """A bwd that never read good settings knows neither HOST nor PORT: front's own gate says them."""
    house.play({"delay": 0.05})
    house.start_front()
    first_bwd = house.start()
    house.ready()
    _listening(house)
    first_bwd.kill()
    first_bwd.wait()
    house.env_file.write_text("PORT=none\n")
    house.start()
    house.until(lambda s: s["phase"] in ("ready", "suspect") and s["settings"]["problems"])
    results: list[tuple[int, list[str]]] = []
    reader = threading.Thread(target=lambda: results.append(_stream(house.port, 60)))
    reader.start()
    house.until(lambda s: s["front"]["in_flight"] == 1)
    house.post("/stop-engine", {"drain": True})
    house.until(lambda s: s["phase"] == "draining")
    assert _front_gate(house)["open"] is False
    reader.join(30)
    assert results[0][1][-1] == "data: [DONE]"
    house.until(lambda s: s["phase"] == "stopped")


# ---------------------------------------------------------------------- secrets
def test_planted_secrets_are_found_nowhere(house: House) -> None:
    """Under the state folder, in what the programs print, in any command line, in the engine's own
    environment; after a reload, a roll back with its snapshot, and a refused edit."""
    key, token, extra = "sk-planted-c0ffee42", "hf_PlantedAbCdEfGhIjKlMnOpQrSt", "planted-extra-9f3b"
    refused = {"raw": f"vllm: error: unrecognized arguments: --no-such-flag {token} {extra}\n"}
    house.play({}, {}, {"start": [*HEALTHY[:3], refused, {"exit": 2}]}, {})
    lines = [f"API_KEY={key}", f"HF_TOKEN={token}", f"EXTRA_ENV=LMCACHE_TOKEN={extra}"]
    house.write_env(*lines)
    house.start_front()
    house.start()
    house.ready()
    _listening(house)
    assert _stream(house.port, 2, key)[0] == 200
    house.write_env(*lines, "MAX_NUM_SEQS=2")
    house.ready(2)
    house.write_env(*lines, "MAX_NUM_SEQS=3")
    house.ready(4)
    house.write_env(f"HF_TOKEN={token}x y", f"API_KEY={key}\u00a0", f"EXTRA_ENV=A_TOKEN='{extra}")
    house.until(lambda s: s["settings"]["problems"])
    house.post("/reload", {"check": True})
    shown = [json.dumps(house.status()), json.dumps(house.events())]
    verbs = ("status", "status --json", "config", "history", "incidents list", "reload", "serve --dry-run")
    shown += [_bwd(house, *verb.split()) for verb in verbs]
    house.write_env(*lines)
    house.ready(5)
    shown += [_bwd(house, *words) for words in (["config"], ["serve", "--dry-run"], ["logs", "-n", "500"])]
    shown += [house.said("bwd"), house.said("front")]
    shown += [
        path.read_text(errors="replace") for path in Path("/proc").glob("[0-9]*/cmdline") if _readable(path)
    ]
    engine = Path(f"/proc/{house.status()['run']['pid']}/environ").read_bytes().decode()
    assert key not in engine
    assert token not in engine
    assert f"LMCACHE_TOKEN={extra}" in engine  # which is what EXTRA_ENV is for
    engine_logs = set((house.state / "logs").glob("engine-*.log"))
    for path in house.state.rglob("*"):
        if path.is_file():
            assert path.stat().st_mode & 0o077 == 0, f"{path} may be read by others"
            if path not in engine_logs:  # the engine was given the secret of EXTRA_ENV, and may print it
                shown.append(path.read_text(errors="replace"))
    for secret in (key, token, extra):
        assert not [text[max(0, text.find(secret) - 200) :][:300] for text in shown if secret in text]


def _readable(path: Path) -> bool:
    try:
        path.read_bytes()
    except OSError:
        return False
    return True


def _bwd(house: House, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "bwd", *words], env=house.environ(BWD_HOME=str(ROOT)), cwd=house.folder,
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    return done.stdout + done.stderr
