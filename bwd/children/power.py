"""The power that the cards draw, twice a second: `python -m bwd.children.power INDEX ...` (NVML's numbers).

A line of JSON each time on standard output, {"power_w": [..], "sm_mhz": [..], "memory_mhz": [..]}, or
{"why": "..."} once where it cannot be had. Ends when its standard input does.
"""

from __future__ import annotations

import json
import select
import sys

_SECONDS = 0.5


def main() -> int:
    try:
        import pynvml as nvml
    except ImportError:
        return _why("the Python package nvidia-ml-py is missing")
    try:
        nvml.nvmlInit()
        cards = [nvml.nvmlDeviceGetHandleByIndex(int(word)) for word in sys.argv[1:]]
        if not cards:
            return _why("no card was named")
        while not select.select([sys.stdin], [], [], _SECONDS)[0]:
            _say(
                power_w=[nvml.nvmlDeviceGetPowerUsage(card) / 1000 for card in cards],
                sm_mhz=[nvml.nvmlDeviceGetClockInfo(card, nvml.NVML_CLOCK_SM) for card in cards],
                memory_mhz=[nvml.nvmlDeviceGetClockInfo(card, nvml.NVML_CLOCK_MEM) for card in cards],
            )
    except nvml.NVMLError as error:
        return _why(f"NVML: {error}")
    return 0


def _say(**fields: object) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def _why(text: str) -> int:
    _say(why=text)
    return 1


if __name__ == "__main__":
    sys.exit(main())
