"""For every test: a Ctrl-C is a Ctrl-C.

A suite that runs in the background of a shell (CI does) inherits SIGINT as ignored, and so would every
program that it starts; the tests that press Ctrl-C mean a person's terminal.
"""

from __future__ import annotations

import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
