"""The installations of tests/commands, for tests of the real supervisord."""

from __future__ import annotations

from tests.commands.conftest import install

__all__ = ["install"]
