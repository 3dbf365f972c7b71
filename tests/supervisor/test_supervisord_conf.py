"""supervisord.conf holds no user value, nests its deadlines, and does with real programs what it says."""

from __future__ import annotations

import configparser
import re
import signal
from pathlib import Path

import pytest

from bwd.adapters import process, supervisord
from bwd.core import dotenv
from bwd.core.lifecycle import Policy
from bwd.core.plan import SHUTDOWN_TIMEOUT_S
from bwd.core.settings import Settings, resolve
from bwd.errors import SettingsError
from tests.commands.conftest import Installation, Make, within

REPOSITORY = Path(__file__).resolve().parents[2]
CONF = REPOSITORY / "supervisor" / "supervisord.conf"
DRAIN_MAX = 600
"""DRAIN_SECONDS at most (bwd/core/keys.py refuses more: tested below)."""


def conf() -> configparser.RawConfigParser:
    parser = configparser.RawConfigParser(inline_comment_prefixes=(";",))
    parser.read(CONF)
    return parser


def number(section: str, key: str) -> int:
    return int(conf()[section][key])


def test_the_stop_chain_nests() -> None:
    """stopwaitsecs > drain + grace + kill wait + reap wait, all of it > what the engine itself waits."""
    policy = Policy()
    longest = DRAIN_MAX + policy.grace + policy.kill_wait + policy.reap_wait + policy.starved_stop
    assert number("program:bwd", "stopwaitsecs") > longest
    assert policy.grace > SHUTDOWN_TIMEOUT_S  # the engine ends by itself before it is killed
    assert number("program:front", "stopwaitsecs") > DRAIN_MAX
    unit = (REPOSITORY / "supervisor" / "bwd.service").read_text()
    stop = re.search(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)
    assert stop is not None
    assert int(stop[1]) > number("program:bwd", "stopwaitsecs") + number("program:front", "stopwaitsecs")


def test_a_longer_drain_is_refused() -> None:
    assert (
        resolve({}, dotenv.parse(f"DRAIN_SECONDS={DRAIN_MAX}\n".encode(), ".env")).drain_seconds == DRAIN_MAX
    )
    with pytest.raises(SettingsError) as refusal:
        resolve({}, dotenv.parse(f"DRAIN_SECONDS={DRAIN_MAX + 1}\n".encode(), ".env"))
    assert len(refusal.value.problems) == 1


def test_both_programs_are_kept_up_and_never_killed_with_their_group_first() -> None:
    for name in ("program:bwd", "program:front"):
        section = conf()[name]
        assert section["autorestart"] == "true"
        assert section["stopasgroup"] == "false"
        assert section["killasgroup"] == "true"
        assert int(section["startsecs"]) > 0  # Supervisor#1285: 0 means an endless respawn
        assert section["stopsignal"] == "TERM"


def test_the_port_is_answered_first_and_last() -> None:
    assert number("program:front", "priority") < number("program:bwd", "priority")


def test_no_setting_of_a_user_is_in_it() -> None:
    text = "\n".join(line for line in CONF.read_text().splitlines() if not line.startswith(";"))
    words = set(re.findall(r"[A-Z][A-Z0-9_]{2,}", text)) - {"TERM"}
    assert words == {"ENV_BWD_RUN_DIR", "BWD_HOME", "BWD_PYTHON"}
    keys = {name.upper() for name in Settings.__dataclass_fields__}
    assert not keys & words


def test_logs_are_bounded() -> None:
    for section in ("program:bwd", "program:front"):
        assert conf()[section]["stdout_logfile_maxbytes"].endswith("MB")
        assert int(conf()[section]["stdout_logfile_backups"]) <= 10
    assert conf()["supervisord"]["logfile_maxbytes"].endswith("MB")


# ------------------------------------------------------------------ the real supervisord
def test_a_killed_daemon_and_a_killed_front_come_back(install: Make) -> None:
    here = install()
    assert here.bwd("serve").code == 0
    assert within(10, lambda: here.bwd("supervisorctl", "status").out.count("RUNNING") == 2)
    before = pids(here)
    for pid in before.values():
        one = process.read(pid)
        assert one is not None
        process.send([one], signal.SIGKILL)
    assert within(15, lambda: here.bwd("supervisorctl", "status").out.count("RUNNING") == 2)
    after = pids(here)
    assert set(before.values()).isdisjoint(after.values())


def test_a_value_with_a_percent_in_the_environment_does_not_stop_it(install: Make) -> None:
    """Supervisor#291: a % in a value of its configuration does; in the environment it must not."""
    here = install(env='EXTRA_ENV="A=50%(x)s"\n')
    here.extra["SOME_VALUE"] = "ab%2Bc %(here)s"
    assert here.bwd("serve").code == 0
    assert here.bwd("stop").code == 0


def test_two_installations_live_side_by_side(install: Make) -> None:
    one, other = install(name="one"), install(name="other")
    assert (one.bwd("serve").code, other.bwd("serve").code) == (0, 0)
    assert one.bwd("stop").code == 0
    assert (one.bwd("status").code, other.bwd("status").code) == (3, 0)
    assert supervisord.find(other.paths) is not None


def pids(here: Installation) -> dict[str, int]:
    found = {}
    for line in here.bwd("supervisorctl", "status").out.splitlines():
        match = re.search(r"^(\w+)\s+RUNNING\s+pid (\d+)", line)
        if match:
            found[match[1]] = int(match[2])
    return found
