"""`python -m bwd`."""

from __future__ import annotations

import sys

from bwd.cli import main

if __name__ == "__main__":
    sys.exit(main())
