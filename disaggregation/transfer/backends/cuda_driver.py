"""``IpcDriver`` over NVIDIA's own driver, ``libcuda.so.1``, without torch.

It works in the primary context of the device, which is torch's, so that addresses of torch's tensors mean the same
here. The context is made current around each call, as other code of the thread may have one, too. Events have no times,
so that to ask for them costs little. Nothing here has run on a GPU yet.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

from ....mem_cache.kv_pages.region import RegionError
from ...errors import LinkLost
from .ipc_driver import DeviceCopy, Export, IpcDriver

LIBRARY = "libcuda.so.1"
SUCCESS, NOT_READY = 0, 600
STREAM_NON_BLOCKING = 1
EVENT_DISABLE_TIMING = 2
IPC_LAZY_ENABLE_PEER_ACCESS = 1
HANDLE_BYTES, UUID_BYTES = 64, 16


class _Handle(ctypes.Structure):
    """``CUipcMemHandle``, which is handed over by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


class _Uuid(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * UUID_BYTES),)


SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuGetErrorString": (c_int, c_void_p),
    "cuDeviceGet": (c_void_p, c_int),
    "cuDeviceGetCount": (c_void_p,),
    "cuDeviceGetUuid_v2": (c_void_p, c_int),
    "cuDeviceCanAccessPeer": (c_void_p, c_int, c_int),
    "cuDevicePrimaryCtxRetain": (c_void_p, c_int),
    "cuDevicePrimaryCtxRelease_v2": (c_int,),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (c_void_p,),
    "cuStreamCreate": (c_void_p, c_uint),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuEventCreate": (c_void_p, c_uint),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventQuery": (c_void_p,),
    "cuEventDestroy_v2": (c_void_p,),
    "cuMemGetAddressRange_v2": (c_void_p, c_void_p, c_uint64),
    "cuMemcpyAsync": (c_uint64, c_uint64, c_size_t, c_void_p),
    "cuIpcGetMemHandle": (c_void_p, c_uint64),
    "cuIpcOpenMemHandle_v2": (c_void_p, _Handle, c_uint),
    "cuIpcCloseMemHandle": (c_uint64,),
}


class CudaError(Exception):
    """A call of the driver's failed; the message says which, and what the driver says."""


def load_driver() -> Callable[[int], IpcDriver]:
    """Load NVIDIA's driver, and return a function that opens the ``IpcDriver`` of a device by its number.

    Raises ``ImportError`` if the driver is not installed.
    """
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError as e:
        raise ImportError(str(e)) from e
    return lambda ordinal: CudaDriver(library, ordinal)


class CudaDriver:
    """The driver API for one device: number ``ordinal`` among those that this process sees."""

    def __init__(self, library: Any, ordinal: int) -> None:
        """Retain the device's primary context and make a stream. Raises ``RegionError``.

        ``library``: NVIDIA's driver, loaded by ctypes. ``ordinal``: number of the GPU among those visible here.
        """
        self._library = library
        for name, arguments in SIGNATURES.items():
            getattr(library, name).argtypes = arguments
        self._context, self._stream = c_void_p(), c_void_p()
        self._ordinal = ordinal
        try:
            self._call("cuInit", 0)
            self._number = self._device(ordinal)
            self.device = self._uuid(self._number)
            self._call("cuDevicePrimaryCtxRetain", byref(self._context), self._number)
            with self._current():
                self._call("cuStreamCreate", byref(self._stream), STREAM_NON_BLOCKING)
        except CudaError as e:
            raise RegionError(f"cuda_ipc can't use GPU {ordinal}: {e}") from e

    def export(self, address: int, nbytes: int) -> Export:
        """Return the IPC handle of the allocation around ``address``, and the offset of ``address`` in it, in bytes.

        Raises ``RegionError`` if CUDA can't export it, or if ``nbytes`` bytes extend beyond the allocation.
        """
        base, size, handle = c_uint64(), c_size_t(), _Handle()
        try:
            with self._current():
                self._call("cuMemGetAddressRange_v2", byref(base), byref(size), address)
                self._call("cuIpcGetMemHandle", byref(handle), base.value)
        except CudaError as e:
            raise RegionError(
                f"no other process can be given the KV pool ({e}): cuda_ipc needs it in a GPU's memory (--device "
                "cuda), as one allocation of cudaMalloc's (PYTORCH_CUDA_ALLOC_CONF must not ask for another allocator, "
                "nor for expandable_segments)"
            ) from e
        if address + nbytes > base.value + size.value:
            raise RegionError("the KV pool is not one allocation of the GPU's memory, as cuda_ipc needs it")
        return Export(bytes(handle), address - base.value)

    def why_not(self, device: bytes) -> str:
        """Return why this GPU can't write the memory of the GPU with UUID ``device``, or "" if it can.

        Reasons: that GPU is not visible to this process, has no peer access, or the driver fails.
        """
        if device == self.device:
            return ""
        try:
            count = c_int()
            self._call("cuDeviceGetCount", byref(count))
            numbers = [self._device(ordinal) for ordinal in range(count.value)]
            there = next((number for number in numbers if self._uuid(number) == device), None)
            if there is None:
                return (
                    f"the peer's GPU {device.hex()} is none of the {count.value} that this instance sees: let both see "
                    "both GPUs (CUDA_VISIBLE_DEVICES) and say by --base-gpu-id which is whose"
                )
            can = c_int()
            self._call("cuDeviceCanAccessPeer", byref(can), self._number, there)
        except CudaError as e:
            return f"it can't be said whether the peer's GPU can be reached: {e}"
        if not can.value:
            return (
                f"GPU {self._ordinal} can't write the memory of the peer's (no NVLink, and no PCIe between peers): "
                "start both instances with --disaggregation-transfer-backend shm"
            )
        return ""

    def open(self, handle: bytes) -> int:
        """Map a peer's allocation by its 64-byte CUDA IPC handle, and return its address in this process.

        Raises ``LinkLost`` if the handle has another length or the driver can't map it.
        """
        if len(handle) != HANDLE_BYTES:
            raise LinkLost(f"the peer's handle has {len(handle)} bytes, not {HANDLE_BYTES}")
        address = c_uint64()
        with self._lost("the peer's GPU memory can't be mapped"), self._current():
            self._call(
                "cuIpcOpenMemHandle_v2", byref(address), _Handle.from_buffer_copy(handle), IPC_LAZY_ENABLE_PEER_ACCESS
            )
        return address.value

    def shut(self, address: int) -> None:
        """Unmap the allocation at an address that ``open`` returned. Raises ``LinkLost`` if the driver can't."""
        with self._lost("the peer's GPU memory can't be unmapped"), self._current():
            self._call("cuIpcCloseMemHandle", address)

    def copy(self, pieces: Sequence[DeviceCopy]) -> Any:
        """Queue the copies on this driver's own stream, and return a CUDA event recorded after them.

        ``is_done`` takes this event as its ticket. Raises ``LinkLost`` if the driver rejects a copy.
        """
        event = c_void_p()
        with self._lost("the GPU did not take a copy"), self._current():
            for target, source, nbytes in pieces:
                self._call("cuMemcpyAsync", target, source, nbytes, self._stream)
            self._call("cuEventCreate", byref(event), EVENT_DISABLE_TIMING)
            self._call("cuEventRecord", event, self._stream)
        return event

    def is_done(self, ticket: Any) -> bool:
        """Return whether the CUDA event ``ticket`` has completed, without waiting.

        Destroys the completed event: don't ask again after True. Raises ``LinkLost`` if a copy failed.
        """
        with self._lost("a copy of the GPU's failed"), self._current():
            code = self._library.cuEventQuery(ticket)
            if code == NOT_READY:
                return False
            self._check("cuEventQuery", code)
            self._call("cuEventDestroy_v2", ticket)
        return True

    def close(self) -> None:
        """Destroy the stream and release the device's primary context. Raises ``LinkLost`` if the driver fails."""
        with self._lost("the GPU can't be let go of"):
            with self._current():
                self._call("cuStreamDestroy_v2", self._stream)
            self._call("cuDevicePrimaryCtxRelease_v2", self._number)

    def _device(self, ordinal: int) -> int:
        number = c_int()
        self._call("cuDeviceGet", byref(number), ordinal)
        return number.value

    def _uuid(self, number: int) -> bytes:
        uuid = _Uuid()
        self._call("cuDeviceGetUuid_v2", byref(uuid), number)
        return bytes(uuid)

    @contextmanager
    def _current(self) -> Iterator[None]:
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            before = c_void_p()
            self._library.cuCtxPopCurrent_v2(byref(before))

    @contextmanager
    def _lost(self, what: str) -> Iterator[None]:
        try:
            yield
        except CudaError as e:
            raise LinkLost(f"{what}: {e}") from e

    def _call(self, name: str, *arguments: Any) -> None:
        self._check(name, getattr(self._library, name)(*arguments))

    def _check(self, name: str, code: int) -> None:
        if code == SUCCESS:
            return
        text = c_char_p()
        self._library.cuGetErrorString(code, byref(text))
        error = text.value.decode(errors="replace") if text.value else "an error without a text"
        raise CudaError(f"{name}: {error} ({code})")
