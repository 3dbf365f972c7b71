"""The systemd unit: quoted for any path, and longer-lived than what it supervises."""

from __future__ import annotations

import configparser
import shutil
import subprocess
from pathlib import Path

import pytest

from bwd import paths as bwd_paths
from bwd.commands import install_service
from bwd.commands.install_service import quote, unit
from tests.commands.conftest import Make

REPOSITORY = Path(__file__).resolve().parents[2]


def test_print_writes_nothing(install: Make, tmp_path: Path) -> None:
    here = install()
    here.extra["XDG_CONFIG_HOME"] = str(tmp_path / "config")
    done = here.bwd("install-service", "--print")
    assert done.code == 0
    assert f'ExecStart="{here.home}/pixiw" run serve --foreground' in done.out
    assert not (tmp_path / "config").exists()


def test_it_is_written_explained_and_removed(install: Make, tmp_path: Path) -> None:
    here = install()
    here.extra["XDG_CONFIG_HOME"] = str(tmp_path / "config")
    done = here.bwd("install-service")
    target = tmp_path / "config" / "systemd" / "user" / "bwd.service"
    assert (done.code, target.is_file()) == (0, True)
    assert "sudo loginctl enable-linger " in done.out
    assert "systemctl --user" in done.out
    removed = here.bwd("install-service", "--remove")
    assert (removed.code, target.exists()) == (0, False)
    assert here.bwd("install-service", "--remove").code == 0


def test_a_folder_that_cannot_be_written(install: Make, tmp_path: Path) -> None:
    here = install()
    (tmp_path / "config").write_text("a file")
    here.extra["XDG_CONFIG_HOME"] = str(tmp_path / "config")
    done = here.bwd("install-service")
    assert done.code == 1
    assert "`bwd install-service --print` prints the unit" in done.err
    assert done.err.count("\n") == 1


def test_nothing_of_the_template_is_left_and_the_state_folder_is_kept() -> None:
    environ = {"BWD_HOME": str(REPOSITORY), "BWD_STATE_DIR": "/data/my state", "PATH": "/nowhere"}
    text = unit(bwd_paths.find(environ), environ)
    assert "@" not in text
    assert 'Environment="BWD_STATE_DIR=/data/my state"' in text
    parser = configparser.RawConfigParser(strict=False)
    parser.read_string(text)
    assert parser["Service"]["KillMode"] == "mixed"


def test_pixi_stays_reachable_at_boot(tmp_path: Path) -> None:
    pixi = tmp_path / "bin" / "pixi"
    pixi.parent.mkdir()
    pixi.write_text("#!/bin/sh\n")
    pixi.chmod(0o755)
    environ = {"BWD_HOME": str(REPOSITORY), "PATH": f"/usr/bin:{pixi.parent}"}
    assert f'Environment="PATH={pixi.parent}:/usr/local/bin:/usr/bin:/bin"' in unit(
        bwd_paths.find(environ), environ
    )


@pytest.mark.parametrize(
    ("text", "quoted"),
    [("/a b", '"/a b"'), ("50%", '"50%%"'), ('say "x"', '"say \\"x\\""'), ("back\\slash", '"back\\\\slash"')],
)
def test_quoting(text: str, quoted: str) -> None:
    assert quote(text) == quoted


def test_a_failure_that_cannot_mend_itself_is_not_repeated() -> None:
    """Exit code 1 (settings, already running) and 2 (usage) would only come again."""
    text = (REPOSITORY / "supervisor" / install_service.UNIT).read_text()
    assert "RestartPreventExitStatus=1 2\n" in text


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not here")
def test_systemd_accepts_it(install: Make, tmp_path: Path) -> None:
    here = install(name="with a space")
    (here.home / "pixiw").symlink_to(REPOSITORY / "pixiw")
    target = tmp_path / "bwd.service"
    target.write_text(here.bwd("install-service", "--print").out)
    done = subprocess.run(
        ["systemd-analyze", "--user", "verify", str(target)],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "/usr/bin:/bin", "XDG_RUNTIME_DIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
