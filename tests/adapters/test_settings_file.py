"""Real files: what can lie where `.env` should be, and the one reading that every command shares."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest

from bwd.adapters import dotenv_file, settings_file
from bwd.core.settings import Origin
from bwd.errors import SettingsError
from bwd.paths import Paths, find

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A repository with profiles and no `.env`."""
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / "profiles").symlink_to(ROOT / "env" / "profiles")
    return tmp_path


def paths_of(home: Path, **environ: str) -> Paths:
    return find({"BWD_HOME": str(home), **environ})


def machine(folder: Path, *cards: str) -> Path:
    """A root folder whose /proc lists these cards."""
    for number, card in enumerate(cards):
        entry = folder / "proc/driver/nvidia/gpus" / f"0000:{number:02x}:00.0"
        entry.mkdir(parents=True)
        (entry / "information").write_text(f"Model: \t\t {card}\nIRQ:   \t\t 99\nGPU UUID: \t GPU-0\n")
    folder.mkdir(exist_ok=True)
    return folder


def problem(path: Path) -> str:
    started = time.monotonic()
    (found,) = dotenv_file.read(path, ".env").problems
    assert time.monotonic() - started < 1
    assert "\n" not in found.line()
    return found.line()


# ---- what can lie there


def test_a_missing_file_is_an_empty_one(tmp_path: Path) -> None:
    found = dotenv_file.read(tmp_path / ".env", ".env")
    assert (found.entries, found.problems) == ((), ())


def test_a_file_is_read(tmp_path: Path) -> None:
    (tmp_path / ".env").write_bytes(b"\xef\xbb\xbfPORT=9000\r\n")
    assert dotenv_file.read(tmp_path / ".env").last()["PORT"].value == "9000"


def test_a_link_to_a_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("PORT=9000")
    (tmp_path / ".env").symlink_to("real")
    assert dotenv_file.read(tmp_path / ".env").last()["PORT"].value == "9000"


def test_a_folder(tmp_path: Path) -> None:
    (tmp_path / ".env").mkdir()
    assert problem(tmp_path / ".env") == ".env: a folder, not a file. Put a text file there"


def test_a_named_pipe_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / ".env")
    assert problem(tmp_path / ".env") == ".env: a named pipe, not a file. Put a text file there"


def test_a_socket(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / ".env"))
        assert "a socket, not a file" in problem(tmp_path / ".env")


def test_a_device() -> None:
    assert "a device, not a file" in problem(Path("/dev/null"))


def test_a_dangling_link(tmp_path: Path) -> None:
    (tmp_path / ".env").symlink_to("gone.env")
    assert problem(tmp_path / ".env") == (
        ".env: a link to gone.env, which is not there. Create that file or remove the link"
    )


def test_a_link_to_itself(tmp_path: Path) -> None:
    (tmp_path / ".env").symlink_to(".env")
    assert "a link that leads back to itself" in problem(tmp_path / ".env")


def test_a_path_through_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "is a file, not a folder" in problem(tmp_path / "file" / ".env")


def test_ten_megabytes(tmp_path: Path) -> None:
    (tmp_path / ".env").write_bytes(b"A=1\n" * (10 * 1024 * 1024 // 4))
    assert "larger than 256 KiB" in problem(tmp_path / ".env")


def test_utf_16(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("PORT=8000\n", encoding="utf-16")
    assert problem(tmp_path / ".env") == ".env: this is UTF-16 text, not UTF-8. Save the file as UTF-8"


def test_no_permission(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("PORT=8000\n")
    (tmp_path / ".env").chmod(0)
    assert unprivileged(tmp_path / ".env") == ".env: no permission to read it. Run chmod u+r .env"


def unprivileged(path: Path) -> str:
    """The problem as a user sees it who is not root: a child of this process that gives root up."""
    if os.getuid() != 0:
        return problem(path)
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setuid(65534)
            os.write(send, problem(path).encode())
        finally:
            os._exit(0)
    os.close(send)
    with os.fdopen(receive) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return text


# ---- the one reading


def test_nothing_there_gives_defaults_and_the_profile_of_the_machine(home: Path, tmp_path: Path) -> None:
    settings = settings_file.load(
        paths_of(home), {}, machine(tmp_path / "m", *["NVIDIA GeForce RTX 5090"] * 2)
    )
    assert settings.profile == "rtx5090x2"
    assert settings.origins["PROFILE"] == Origin("default", "auto: 2 x NVIDIA GeForce RTX 5090")
    assert settings.build_arch == "12.0"
    assert settings.origins["BUILD_ARCH"].where.startswith("env/profiles/rtx5090x2.env:")


def test_a_machine_without_a_card(home: Path, tmp_path: Path) -> None:
    settings = settings_file.load(paths_of(home), {}, machine(tmp_path / "m"))
    assert (settings.profile, settings.model) == ("cpu", "demo")


def test_cards_without_names_get_no_profile(home: Path, tmp_path: Path) -> None:
    (tmp_path / "m" / "dev").mkdir(parents=True)
    (tmp_path / "m" / "dev" / "dxg").touch()
    settings = settings_file.load(paths_of(home), {}, tmp_path / "m")
    assert (settings.profile, settings.model) == ("none", "auto")


def test_the_profile_named_in_the_file_or_the_shell(home: Path, tmp_path: Path) -> None:
    (home / ".env").write_text("PROFILE=seed\n")
    root = machine(tmp_path / "m")
    settings = settings_file.load(paths_of(home), {}, root)
    assert settings.profile == "seed"
    assert "--enforce-eager" in settings.extra_vllm_args
    assert settings.origins["PROFILE"] == Origin("file", ".env:1")
    assert settings_file.load(paths_of(home), {"PROFILE": "none"}, root).extra_vllm_args == ()


def test_a_profile_that_is_not_there(home: Path, tmp_path: Path) -> None:
    (home / ".env").write_text("PORT=x\nPROFILE=rtx5090\n")
    with pytest.raises(SettingsError) as caught:
        settings_file.load(paths_of(home), {}, machine(tmp_path / "m"))
    assert [found.line() for found in caught.value.problems] == [
        ".env:1 PORT: 'x' is not a whole number. Use 1 to 65535",
        ".env:2 PROFILE: there is no profile 'rtx5090'. Use rtx5090x2",
    ]


def test_a_profile_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "env" / "profiles").mkdir(parents=True)
    (tmp_path / "env" / "profiles" / "mine.env").write_text("REPLICAS=3\n")
    settings = settings_file.load(paths_of(tmp_path), {"PROFILE": "mine"}, machine(tmp_path / "m"))
    assert settings.replicas == 3
    assert settings.origins["REPLICAS"] == Origin("profile", "env/profiles/mine.env:1")


def test_the_profile_that_tune_wrote(home: Path, tmp_path: Path) -> None:
    local = home / "var" / "profiles"
    local.mkdir(parents=True)
    (local / "local.env").write_text("REPLICAS=3\n")
    (local / "seed.env").write_text("REPLICAS=4\n")
    settings = settings_file.load(paths_of(home), {"PROFILE": "local"}, machine(tmp_path / "m"))
    assert settings.origins["REPLICAS"] == Origin("profile", "var/profiles/local.env:1")
    seed = settings_file.load(paths_of(home), {"PROFILE": "seed"}, machine(tmp_path / "m"))
    assert seed.replicas == 1  # of two with one name the repository's counts


def test_another_settings_file_is_called_by_its_path(home: Path, tmp_path: Path) -> None:
    other = tmp_path / "elsewhere.conf"
    other.write_text("PORT=x\n")
    inside = paths_of(home, BWD_ENV_FILE="elsewhere.conf")
    assert settings_file.env_file_name(inside) == "elsewhere.conf"
    outside = find({"BWD_HOME": str(home / "env"), "BWD_ENV_FILE": str(other)})
    with pytest.raises(SettingsError) as caught:
        settings_file.load(outside, {"PROFILE": "none"}, machine(tmp_path / "m"))
    assert caught.value.problems[0].where == f"{other}:1"


def test_paths_are_made_absolute_and_the_model_stays_as_given(home: Path, tmp_path: Path) -> None:
    (home / ".env").write_text("ENGINE_PYTHON=./v/bin/python\nHF_HOME=~/hf\nMODEL=./models/x\n")
    settings = settings_file.load(paths_of(home), {}, machine(tmp_path / "m"))
    assert settings.engine_python == str(home / "v/bin/python")
    assert settings.hf_home == str(Path.home() / "hf")
    assert settings.model == "./models/x"


def test_a_broken_file_is_told_with_everything_else(home: Path, tmp_path: Path) -> None:
    (home / ".env").mkdir()
    with pytest.raises(SettingsError) as caught:
        settings_file.load(paths_of(home), {"PORT": "x"}, machine(tmp_path / "m"))
    assert [found.where for found in caught.value.problems] == [".env", "process environment"]


def test_reading_does_not_write(home: Path, tmp_path: Path) -> None:
    (home / ".env").write_text("PORT=9000\n")
    before = (home / ".env").stat()
    settings_file.load(paths_of(home), {}, machine(tmp_path / "m"))
    after = (home / ".env").stat()
    assert (after.st_mtime_ns, after.st_ctime_ns) == (before.st_mtime_ns, before.st_ctime_ns)
