"""The few calls of the CUDA driver that the P2P test makes, by ctypes: no torch, so that a process is up
in a second and nothing but the driver stands between the test and the cards.

Names and signatures are those of cuda.h, the numbers its enumerations'. Everything raises CudaError.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p
from pathlib import Path

OUT_OF_MEMORY = 2
PEER_ACCESS_UNSUPPORTED = 217
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_CAPTURE_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL


class CudaError(Exception):
    """A call that did not succeed: its name and the driver's code and word for it."""

    def __init__(self, call: str, code: int, word: str) -> None:
        super().__init__(f"{call}: {word or 'error'} ({code})")
        self.call, self.code = call, code


class IpcHandle(ctypes.Structure):
    """CUipcMemHandle: names device memory to another process. Passed by value."""

    _fields_ = (("reserved", c_ubyte * 64),)

    def hex(self) -> str:
        return bytes(self.reserved).hex()

    @staticmethod
    def from_hex(text: str) -> IpcHandle:
        return IpcHandle.from_buffer_copy(bytes.fromhex(text))


class Card:
    """One card, ready for use by this process: the primary context of device `ordinal`, a stream, and the
    functions of the PTX text in `module`. Memory is by device address (int), sizes in bytes."""

    def __init__(self, ordinal: int, library: str, module: Path) -> None:
        try:
            self._cuda = ctypes.CDLL(library)
        except OSError as error:
            raise CudaError("loading the driver's library", -1, str(error)) from error
        self._call("cuInit", c_uint(0))
        self.device = self._device(ordinal)
        context = c_void_p()
        self._call("cuDevicePrimaryCtxRetain", byref(context), c_int(self.device))
        self._call("cuCtxSetCurrent", context)
        self._stream = c_void_p()
        self._call("cuStreamCreate", byref(self._stream), c_uint(_NON_BLOCKING))
        self._functions: dict[str, c_void_p] = {}
        self._module = c_void_p()
        self._call("cuModuleLoadData", byref(self._module), c_char_p(module.read_bytes() + b"\0"))

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._cuda, name)(*arguments)
        if code:
            raise CudaError(name, code, self._word(code))

    def _word(self, code: int) -> str:
        text = c_char_p()
        self._cuda.cuGetErrorString(c_int(code), byref(text))
        return (text.value or b"").decode("ascii", "replace")

    def _device(self, ordinal: int) -> int:
        device = c_int()
        self._call("cuDeviceGet", byref(device), c_int(ordinal))
        return device.value

    @property
    def stream(self) -> c_void_p:
        """For a library that launches on it (NCCL)."""
        return self._stream

    def reaches(self, ordinal: int) -> bool:
        """Whether the driver says that this card can read and write the memory of device `ordinal`."""
        answer = c_int()
        self._call("cuDeviceCanAccessPeer", byref(answer), c_int(self.device), c_int(self._device(ordinal)))
        return bool(answer.value)

    def allocate(self, size: int) -> int:
        address = c_uint64()
        self._call("cuMemAlloc_v2", byref(address), c_size_t(size))
        return address.value

    def free(self, address: int) -> None:
        self._call("cuMemFree_v2", c_uint64(address))

    def share(self, address: int) -> IpcHandle:
        handle = IpcHandle()
        self._call("cuIpcGetMemHandle", byref(handle), c_uint64(address))
        return handle

    def open(self, handle: IpcHandle) -> int:
        """The address at which another process's memory can be used by this card."""
        address = c_uint64()
        self._call("cuIpcOpenMemHandle_v2", byref(address), handle, c_uint(_LAZY_PEER_ACCESS))
        return address.value

    def close(self, address: int) -> None:
        self._call("cuIpcCloseMemHandle", c_uint64(address))

    def set_bytes(self, address: int, value: int, size: int) -> None:
        self._call("cuMemsetD8Async", c_uint64(address), c_ubyte(value), c_size_t(size), self._stream)

    def set_words(self, address: int, value: int, words: int) -> None:
        self._call("cuMemsetD32Async", c_uint64(address), c_uint(value), c_size_t(words), self._stream)

    def copy(self, to: int, source: int, size: int) -> None:
        """By the copy engine, from card to card as the addresses say."""
        self._call("cuMemcpyDtoDAsync_v2", c_uint64(to), c_uint64(source), c_size_t(size), self._stream)

    def read(self, address: int, size: int) -> bytes:
        """The bytes there, once everything on the stream is done."""
        self.wait()
        into = (c_ubyte * size)()
        self._call("cuMemcpyDtoH_v2", into, c_uint64(address), c_size_t(size))
        return bytes(into)

    def launch(self, name: str, blocks: int, threads: int, arguments: Sequence[object]) -> None:
        """Start a kernel on the stream; `arguments` are ctypes values in its order."""
        function = self._functions.get(name)
        if function is None:
            function = self._functions[name] = c_void_p()
            self._call("cuModuleGetFunction", byref(function), self._module, c_char_p(name.encode()))
        places = (c_void_p * len(arguments))(
            *(ctypes.addressof(argument) for argument in arguments)  # type: ignore[arg-type]
        )
        one = c_uint(1)
        self._call(
            "cuLaunchKernel", function, c_uint(blocks), one, one, c_uint(threads), one, one,
            c_uint(0), self._stream, places, c_void_p(),
        )  # fmt: skip

    def wait(self) -> None:
        """Until everything on the stream is done."""
        self._call("cuStreamSynchronize", self._stream)

    def begin_graph(self) -> None:
        """What is launched from here on is recorded, not run."""
        self._call("cuStreamBeginCapture_v2", self._stream, c_int(_CAPTURE_THREAD_LOCAL))

    def end_graph(self) -> c_void_p:
        graph, whole = c_void_p(), c_void_p()
        self._call("cuStreamEndCapture", self._stream, byref(graph))
        self._call("cuGraphInstantiateWithFlags", byref(whole), graph, ctypes.c_ulonglong(0))
        return whole

    def run_graph(self, graph: c_void_p) -> None:
        self._call("cuGraphLaunch", graph, self._stream)
