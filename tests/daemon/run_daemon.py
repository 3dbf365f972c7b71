"""The real daemon with short times, as a program: python run_daemon.py JSON. The JSON has the fields of
Policy, Limits and ProbeSpec that differ from the product's."""

from __future__ import annotations

import json
import sys

from bwd.core.lifecycle import Policy
from bwd.core.probes import ProbeSpec
from bwd.daemon import entry
from bwd.daemon.world import Limits

SHORT = {
    "policy": {
        "communicator": 6.0,
        "start_warm": 12.0,
        "start_cold": 12.0,
        "grace": 2.0,
        "kill_wait": 5.0,
        "reap_wait": 8.0,
        "backoff": (0.3, 0.5, 1.0),
        "burst": 3,
        "window": 60.0,
        "forgive": 20.0,
        "held_retry": 0.5,
        "held_limit": 3.0,
    },
    "limits": {
        "startup_probe": 0.1,
        "glance": 0.1,
        "scan": 1.0,
        "snapshot": 2.0,
        "stacks": 0.2,
        "gate": 0.3,
    },
    "spec": {
        "interval": 0.4,
        "suspect_interval": 0.2,
        "window": 2.0,
        "stopped_window": 2.0,
        "canary_period": 2.0,
        "canary_timeout": 1.5,
        "gap": 5.0,
        "step_tokens": 1,
        "blind_window": 3.0,
        "blind_canaries": 2,
    },
}


def main() -> int:
    given = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}

    def of(name: str) -> dict[str, object]:
        return {**SHORT[name], **given.get(name, {})}

    return entry.run(
        policy=Policy(**of("policy")),
        limits=Limits(**of("limits")),
        spec=ProbeSpec(**of("spec")),
    )


if __name__ == "__main__":
    sys.exit(main())
