"""Runs after ../sitecustomize.py in every Python process of the CPU engine.

Hides what pixi.toml [tool.pixiw.leave-out.cpu] leaves out, so that the engine starts the same from pixi's
environment, which has to hold it, and from pixiw's, which does not: transformers imports torchaudio and
torchvision wherever it finds them, and PyPI's torchaudio wants CUDA's libraries (docs/decisions/0003).
"""

import sys
from importlib.machinery import PathFinder

HIDDEN = frozenset({"torchaudio", "torchcodec", "torchvision", "triton"})


class _Visible(PathFinder):
    """Python's finder of installed modules, blind to the hidden ones: not found, as if not installed."""

    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        return None if path is None and fullname in HIDDEN else super().find_spec(fullname, path, target)


sys.meta_path[:] = [_Visible if finder is PathFinder else finder for finder in sys.meta_path]
