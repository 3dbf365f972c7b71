"""The few calls of NCCL that the P2P test makes, by ctypes, on the very library that the engine loads."""

from __future__ import annotations

import ctypes
import importlib.util
import os
from ctypes import byref, c_char_p, c_int, c_size_t, c_void_p
from pathlib import Path

_UINT32, _SUM = 3, 0  # ncclUint32, ncclSum


class NcclError(Exception):
    """A call that did not succeed, or no library at all (`code` 0)."""

    def __init__(self, call: str, code: int, word: str) -> None:
        super().__init__(f"{call}: {word or 'error'}" + (f" ({code})" if code else ""))
        self.code = code


class UniqueId(ctypes.Structure):
    """ncclUniqueId: names a communicator to its ranks. Passed by value."""

    _fields_ = (("internal", ctypes.c_byte * 128),)

    def hex(self) -> str:
        return bytes(self).hex()

    @staticmethod
    def from_hex(text: str) -> UniqueId:
        return UniqueId.from_buffer_copy(bytes.fromhex(text))


def find(asked: str = "") -> str:
    """The path of libnccl.so.2: `asked`, the wheel that torch brings (nvidia-nccl-cu13), or what the
    loader finds. Nothing heavy is imported for it."""
    if asked:
        return asked
    folders: list[str] = []
    for package in ("nvidia.nccl", "torch"):
        try:
            spec = importlib.util.find_spec(package)
        except ImportError:
            continue
        folders += list(spec.submodule_search_locations or ()) if spec is not None else []
    for folder in folders:
        found = Path(folder) / "lib" / "libnccl.so.2"
        if found.is_file():
            return os.fspath(found)
    return "libnccl.so.2"


class Nccl:
    """A loaded library, and one communicator of it once `join` was called."""

    def __init__(self, path: str) -> None:
        try:
            self._nccl = ctypes.CDLL(path)
        except OSError as error:
            raise NcclError("loading NCCL", 0, str(error)) from error
        self._nccl.ncclGetErrorString.restype = c_char_p
        self._comm = c_void_p()

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._nccl, name)(*arguments)
        if code:
            word = self._nccl.ncclGetErrorString(c_int(code)) or b""
            raise NcclError(name, code, word.decode("ascii", "replace"))

    def version(self) -> str:
        number = c_int()
        self._call("ncclGetVersion", byref(number))
        major, rest = divmod(number.value, 10000)
        return f"{major}.{rest // 100}.{rest % 100}"

    def unique_id(self) -> UniqueId:
        made = UniqueId()
        self._call("ncclGetUniqueId", byref(made))
        return made

    def join(self, ranks: int, unique_id: UniqueId, rank: int) -> None:
        self._call("ncclCommInitRank", byref(self._comm), c_int(ranks), unique_id, c_int(rank))

    def all_reduce(self, source: int, into: int, words: int, stream: c_void_p) -> None:
        """The sum over all ranks of unsigned 32-bit words, which wraps."""
        self._call(
            "ncclAllReduce", c_void_p(source), c_void_p(into), c_size_t(words), c_int(_UINT32), c_int(_SUM),
            self._comm, stream,
        )  # fmt: skip

    def leave(self) -> None:
        self._call("ncclCommDestroy", self._comm)
