"""Plays bwd.children.load: `load_generator.py MODE RESULT`, answers each order as MODE says.

good     prints progress as tqdm does, writes RESULT where the order wants it, answers "done"
brief    the same, and is done at once
refuse   answers with an error
silent   never answers, and starts a child that would outlive it
dead     ends in the middle
late     never becomes ready
echo     writes its arguments, environment and working key into the result's place
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path


def main() -> int:
    mode, result = sys.argv[1], sys.argv[2]
    if mode == "late":
        time.sleep(600)
    print(json.dumps({"event": "ready"}), flush=True)
    for line in sys.stdin:
        argv = json.loads(line)["argv"]
        target = Path(argv[argv.index("--result-dir") + 1]) / argv[argv.index("--result-filename") + 1]
        if mode == "refuse":
            print(json.dumps({"event": "error", "message": "ValueError: no"}), flush=True)
            continue
        if mode == "dead":
            print("Segmentation fault (played)", file=sys.stderr, flush=True)
            return 1
        if mode == "silent":
            print(subprocess.Popen(["sleep", "600"]).pid, file=sys.stderr, flush=True)
            time.sleep(600)
        print("\r  50%|#####     | 4/8 [00:01<00:01,  3.9it/s]", end="", file=sys.stderr, flush=True)
        if mode == "echo":
            seen = {name: os.environ.get(name) for name in ("OPENAI_API_KEY", "BWD_RUN_ID", "http_proxy")}
            Path(result).write_text(json.dumps({"argv": argv, "env": seen}))
            result = str(Path(__file__).parents[1] / "core" / "bench_results" / "streams-8.json")
        if mode != "brief":
            time.sleep(0.6)
        shutil.copy(result, target)
        print(json.dumps({"event": "done"}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
