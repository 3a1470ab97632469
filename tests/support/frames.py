"""The compiled handlers called without XLA, on XLA FFI call frames (xla/ffi/api/c_api.h) made here.

A frame can be malformed, as XLA never sends it. Its buffers lie between red zones, which show writes and reads outside
a buffer, and elements left unwritten. Buffers are in host memory for the CPU half and in device memory for the CUDA
half. Needs JAX only to record its calls (`record`).
"""

from __future__ import annotations

import ctypes as c
import dataclasses
import functools
import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest

from jaxops import _kernel

ZONE = 256  # bytes in the red zone before and behind a buffer

#: The tool that watches memory itself, if one does: no red zones, and nothing written to results beforehand.
BARE = os.environ.get("JAXOPS_BARE_MEMORY", "")

#: XLA's numbers for the dtypes that handlers take.
DTYPES = {
    np.dtype(dtype): code
    for dtype, code in {
        np.bool_: 1,
        np.int8: 2,
        np.int32: 4,
        np.int64: 5,
        np.float16: 10,
        np.float32: 11,
        np.float64: 12,
        ml_dtypes.bfloat16: 16,
        ml_dtypes.float8_e5m2: 19,
        ml_dtypes.float8_e4m3fn: 20,
    }.items()
}
INVALID_ARGUMENT, UNIMPLEMENTED, INTERNAL = 3, 12, 13  # XLA's error codes


class HandlerError(Exception):
    """A handler's error: XLA's error code, and the message."""

    def __init__(self, code: int, message: str):
        super().__init__(f"{code}: {message}")
        self.code = code


@dataclasses.dataclass(frozen=True)
class Operand:
    """A call's buffer. code: the dtype's code; data: "own" memory, none ("null"), or a byte beside it ("odd")."""

    shape: tuple[int, ...]
    code: int
    data: str = "own"

    @classmethod
    def of(cls, aval) -> Operand:
        return cls(tuple(aval.shape), DTYPES[np.dtype(aval.dtype)])

    @property
    def dtype(self) -> np.dtype:
        return next((dtype for dtype, code in DTYPES.items() if code == self.code), np.dtype(np.uint8))

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Call:
    """A handler call. attributes: numpy scalars and arrays, floats and strings."""

    handler: str
    operands: tuple[Operand, ...]
    results: tuple[Operand, ...]
    attributes: Mapping[str, Any]

    def replace(self, **changes: Any) -> Call:
        return dataclasses.replace(self, **changes)

    @property
    def workspaces(self) -> set[int]:
        """The results that are the handler's workspaces; it may leave parts of them unwritten."""
        if self.handler.startswith("attention"):
            return {len(self.results) - 1}
        if self.handler == "matmul":
            return set(range(1 + bool(self.attributes["has_preactivation"]), len(self.results)))
        found = {len(self.results) - 1} if self.attributes.get("has_parts") else set()
        sums = any(self.attributes.get(name) for name in ("has_dscale", "has_dbias"))
        return found | ({int(self.attributes.get("has_dz", True))} if self.handler.endswith("_bwd") and sums else set())


def record(function: Callable, *args: Any, platform: str = "cpu") -> list[Call]:
    """The handler calls that a jitted function makes; it needs no device of the platform."""
    import jax

    calls = []
    original = _kernel.Kernel.ffi_call

    def ffi_call(kernel, results, *operands, **attributes):
        buffers = (tuple(map(Operand.of, values)) for values in (operands, results))
        calls.append(Call(kernel.name, *buffers, dict(attributes)))
        return original(kernel, results, *operands, **attributes)

    with mock.patch.object(_kernel.Kernel, "ffi_call", ffi_call):
        jax.jit(lambda *xs: function(*xs)).trace(*args).lower(lowering_platforms=(platform,))
    return calls


def draw(call: Call, rng: np.random.Generator) -> list[np.ndarray]:
    """Values for the operands."""
    values = []
    for operand in call.operands:
        if operand.code == 1:
            values.append(rng.random(operand.shape) < 0.7)
        else:
            values.append(rng.standard_normal(operand.shape, np.float32).astype(operand.dtype))
    return values


# --- memory ---


class Host:
    """Memory from the C library, which a sanitizer's allocator watches."""

    half = "cpu"

    def __init__(self):
        self._library = c.CDLL(None)
        self._library.free.argtypes = [c.c_void_p]

    def synchronize(self) -> None:
        pass  # a handler returns when it is done

    def allocate(self, size: int) -> int:
        pointer = c.c_void_p()
        if self._library.posix_memalign(c.byref(pointer), c.c_size_t(64), c.c_size_t(size)):
            raise MemoryError(size)
        return pointer.value

    def free(self, pointer: int) -> None:
        self._library.free(pointer)

    def write(self, pointer: int, data: np.ndarray) -> None:
        c.memmove(pointer, data.ctypes.data, data.nbytes)

    def read(self, pointer: int, size: int) -> np.ndarray:
        return np.frombuffer(c.string_at(pointer, size), np.uint8)


class Device:
    """Memory on the first CUDA device, by its driver."""

    half = "cuda"

    def __init__(self):
        self._driver = c.CDLL("libcuda.so.1")
        device, context = c.c_int(), c.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", c.byref(device), 0)
        self._call("cuDevicePrimaryCtxRetain", c.byref(context), device)
        self._context = context
        self.enter()

    def _call(self, name, *args):
        if status := getattr(self._driver, name)(*args):
            raise RuntimeError(f"{name}: CUDA error {status}")

    def enter(self) -> None:
        """Before a thread uses the device."""
        self._call("cuCtxSetCurrent", self._context)

    def stream(self) -> int:
        """A stream that waits for no other."""
        stream = c.c_void_p()
        self._call("cuStreamCreate", c.byref(stream), 1)
        return stream.value

    def synchronize(self) -> None:
        self._call("cuCtxSynchronize")

    def allocate(self, size: int) -> int:
        # Whole 16-byte packs: kernels read every pack that holds an element; XLA allocates multiples of 256 bytes.
        pointer, rest = c.c_uint64(), -size % 16
        self._call("cuMemAlloc_v2", c.byref(pointer), c.c_size_t(size + rest))
        if rest:
            self._call("cuMemsetD8_v2", c.c_uint64(pointer.value + size), c.c_ubyte(0), c.c_size_t(rest))
        return pointer.value

    def free(self, pointer: int) -> None:
        self._call("cuMemFree_v2", c.c_uint64(pointer))

    def write(self, pointer: int, data: np.ndarray) -> None:
        self._call("cuMemcpyHtoD_v2", c.c_uint64(pointer), c.c_void_p(data.ctypes.data), c.c_size_t(data.nbytes))

    def read(self, pointer: int, size: int) -> np.ndarray:
        data = np.empty(size, np.uint8)
        self._call("cuMemcpyDtoH_v2", c.c_void_p(data.ctypes.data), c.c_uint64(pointer), c.c_size_t(size))
        return data


# --- frames ---

_POINTER, _SIZE, _LONG, _INT = c.c_void_p, c.c_size_t, c.c_int64, c.c_int


def _struct(name: str, *fields: tuple[str, Any]) -> type[c.Structure]:
    return type(name, (c.Structure,), {"_fields_": list(fields)})


_HEAD = (("struct_size", _SIZE), ("extension_start", _POINTER))
_Buffer = _struct("Buffer", *_HEAD, ("dtype", _INT), ("data", _POINTER), ("rank", _LONG), ("dims", _POINTER))
_List = _struct("List", *_HEAD, ("size", _LONG), ("types", _POINTER), ("values", _POINTER))
_Attributes = _struct(
    "Attributes", *_HEAD, ("size", _LONG), ("types", _POINTER), ("names", _POINTER), ("values", _POINTER)
)
_Scalar = _struct("Scalar", ("dtype", _INT), ("value", _POINTER))
_Array = _struct("Array", ("dtype", _INT), ("size", _SIZE), ("data", _POINTER))
_Text = _struct("Text", ("pointer", c.c_char_p), ("length", _SIZE))
_Frame = _struct(
    "Frame",
    *_HEAD,
    ("api", _POINTER),
    ("context", _POINTER),
    ("stage", _INT),
    ("operands", _List),
    ("results", _List),
    ("attributes", _Attributes),
    ("future", _POINTER),
)
_EXECUTE = 3
_Handler = c.CFUNCTYPE(_POINTER, c.POINTER(_Frame))
_Task = c.CFUNCTYPE(None, _POINTER)
_Function = c.CFUNCTYPE(_POINTER, _POINTER)

_ErrorArguments = _struct("ErrorArguments", *_HEAD, ("message", c.c_char_p), ("code", _INT))
_StreamArguments = _struct("StreamArguments", *_HEAD, ("context", _POINTER), ("stream", _POINTER))
_ScheduleArguments = _struct("ScheduleArguments", *_HEAD, ("context", _POINTER), ("task", _Task), ("data", _POINTER))
_ThreadsArguments = _struct("ThreadsArguments", *_HEAD, ("context", _POINTER), ("threads", c.POINTER(_LONG)))

_Version = _struct("Version", *_HEAD, ("major", _INT), ("minor", _INT))
_API = [
    "Error_Create",
    "Error_GetMessage",
    "Error_Destroy",
    "Handler_Register",
    "Stream_Get",
    "Type_Register",
    "ExecutionContext_Get",
    "State_Set",
    "State_Get",
    "DeviceMemory_Allocate",
    "DeviceMemory_Free",
    "ThreadPool_Schedule",
    "ThreadPool_NumThreads",
    "Future_Create",
    "Future_SetAvailable",
    "Future_SetError",
    "RunId_Get",
    "DeviceOrdinal_Get",
]
_Api = _struct("Api", *_HEAD, ("version", _Version), ("internal", _POINTER), *((name, _POINTER) for name in _API))


class _Xla:
    """The services that a handler asks for from XLA: error objects, a stream, and a thread for each scheduled task."""

    def __init__(self, threads: int, stream: int | None):
        self._threads = threads
        self._stream = stream
        self._errors: dict[int, tuple[int, str]] = {}
        self._running: list[threading.Thread] = []
        functions = {
            "Error_Create": self._create_error,
            "Stream_Get": self._get_stream,
            "ThreadPool_Schedule": self._schedule,
            "ThreadPool_NumThreads": self._count_threads,
        }
        self._callbacks = [_Function(functions[name]) if name in functions else None for name in _API]
        pointers = [c.cast(f, _POINTER) if f else None for f in self._callbacks]
        self._api = _Api(c.sizeof(_Api), None, _Version(c.sizeof(_Version), None, 0, 3), None, *pointers)
        self.address = c.addressof(self._api)

    def _create_error(self, arguments):
        error = c.cast(arguments, c.POINTER(_ErrorArguments)).contents
        key = len(self._errors) + 1
        self._errors[key] = (error.code, error.message.decode())
        return key

    def _get_stream(self, arguments):
        c.cast(arguments, c.POINTER(_StreamArguments)).contents.stream = self._stream
        return None

    def _schedule(self, arguments):
        scheduled = c.cast(arguments, c.POINTER(_ScheduleArguments)).contents
        thread = threading.Thread(target=scheduled.task, args=(scheduled.data,))
        self._running.append(thread)
        thread.start()
        return None

    def _count_threads(self, arguments):
        c.cast(arguments, c.POINTER(_ThreadsArguments)).contents.threads[0] = self._threads
        return None

    def finish(self, error: int | None) -> None:
        """Waits for the tasks; raises the handler's error."""
        for thread in self._running:
            thread.join()
        if error:
            raise HandlerError(*self._errors[error])


def _pointers(keep: list, structures: Sequence[Any]) -> int:
    addresses = np.array([c.addressof(s) for s in structures] or [0], np.uint64)
    keep += [addresses, *structures]
    return addresses.ctypes.data


def _array(keep: list, values: Any, dtype: Any) -> int:
    array = np.array(values if len(values) else [0], dtype)
    keep.append(array)
    return array.ctypes.data


def _buffers(keep: list, buffers: Sequence[Operand], addresses: Sequence[int]) -> _List:
    made = []
    for buffer, address in zip(buffers, addresses, strict=True):
        data = {"own": address, "null": None, "odd": address + 1}[buffer.data]
        dims = _array(keep, buffer.shape, np.int64)
        made.append(_Buffer(c.sizeof(_Buffer), None, buffer.code, data, len(buffer.shape), dims))
    return _List(c.sizeof(_List), None, len(made), _array(keep, [1] * len(made), np.int32), _pointers(keep, made))


def _attributes(keep: list, attributes: Mapping[str, Any]) -> _Attributes:
    """Sorted by name, as XLA has them."""
    types, names, values = [], [], []
    for name, value in sorted(attributes.items()):
        names.append(_Text(name.encode(), len(name)))
        if isinstance(value, str):
            types.append(4)
            values.append(_Text(value.encode(), len(value)))
            continue
        value = np.asarray(value)
        code, data = DTYPES[value.dtype], _array(keep, value.reshape(-1), value.dtype)
        types.append(1 if value.ndim else 3)
        values.append(_Array(code, value.size, data) if value.ndim else _Scalar(code, data))
    return _Attributes(
        c.sizeof(_Attributes),
        None,
        len(names),
        _array(keep, types, np.int32),
        _pointers(keep, names),
        _pointers(keep, values),
    )


@functools.cache
def _handler(half: str, name: str):
    from jaxops import _cpu

    if half == "cuda":
        from jaxops import _cuda as module
    else:
        module = _cpu
    get = c.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = _POINTER, [c.py_object, c.c_char_p]
    return _Handler(get(module.targets()[name], None))


def call_handler(
    half: str,
    call: Call,
    operands: Sequence[int],
    results: Sequence[int],
    threads: int = 1,
    stream: int | None = None,
) -> None:
    """Calls a handler in one half, "cpu" or "cuda", on buffers at addresses; raises HandlerError.

    threads: in XLA's pool; stream: CUDA's, None for the default one.
    """
    keep: list = []
    xla = _Xla(threads, stream)
    frame = _Frame(
        c.sizeof(_Frame) - 8,  # up to the attributes
        None,
        xla.address,
        None,
        _EXECUTE,
        _buffers(keep, call.operands, operands),
        _buffers(keep, call.results, results),
        _attributes(keep, call.attributes),
        None,
    )
    xla.finish(_handler(half, call.handler)(c.byref(frame)))


def run(
    half: str,
    memory: Host | Device,
    call: Call,
    values: Sequence[np.ndarray],
    *,
    fill: int | None,
    threads: int = 1,
    stream: int | None = None,
) -> list[np.ndarray]:
    """Calls a handler on its own memory and returns the results' bytes.

    fill: results, and the red zones around all buffers, are filled with this byte beforehand. Zones and operands must
    not change. None: there are no zones, and nothing is written to the results' memory beforehand, for tools that watch
    the memory themselves.
    """
    zone = 0 if fill is None else ZONE
    buffers = (*call.operands, *call.results)
    filled = [] if fill is None else [np.full(2 * zone + b.bytes, fill, np.uint8) for b in buffers]
    contents = [np.ascontiguousarray(v).reshape(-1).view(np.uint8) for v in values]
    for image, content in zip(filled, contents, strict=False):
        image[zone : zone + content.size] = content
    bases = [memory.allocate(max(2 * zone + b.bytes, 1)) for b in buffers]
    try:
        for base, image in zip(bases, filled or contents, strict=False):
            memory.write(base, image)
        addresses, split = [base + zone for base in bases], len(call.operands)
        call_handler(half, call, addresses[:split], addresses[split:], threads, stream)
        memory.synchronize()
        # Without zones nothing is read that the handler may have left unwritten.
        unread = set() if zone else {split + i for i in call.workspaces}
        images = [
            memory.read(base, 0 if i in unread else 2 * zone + b.bytes)
            for i, (base, b) in enumerate(zip(bases, buffers, strict=True))
        ]
    finally:
        for base in bases:
            memory.free(base)
    for i, (image, buffer) in enumerate(zip(images, buffers, strict=True)):
        if i in unread:
            continue
        what = f"operand {i}" if i < split else f"result {i - split}"
        beside = np.concatenate([image[:zone], image[zone + buffer.bytes :]])
        assert (beside == (fill or 0)).all(), f"{call.handler}: memory beside {what} was written"
        if i < split:
            inside = image[zone : zone + buffer.bytes]
            assert np.array_equal(inside, contents[i]), f"{call.handler}: {what} was written"
    return [image[zone : zone + buffer.bytes] for image, buffer in zip(images[split:], call.results, strict=True)]


def check_memory(half: str, memory: Host | Device, call: Call, rng: np.random.Generator) -> None:
    """Every result element is written, nothing beside the results, and nothing read beside the operands counts.

    Two runs, on memory filled with NaN and with zeros, and with one and several threads, give the same to the bit.
    """
    values = draw(call, rng)
    if BARE:
        run(half, memory, call, values, fill=None, threads=3)
        return
    first = run(half, memory, call, values, fill=0xFF)
    second = run(half, memory, call, values, fill=0x00, threads=3)
    for i, (a, b) in enumerate(zip(first, second, strict=True)):
        if i in call.workspaces:
            continue
        differ = np.flatnonzero(a != b) // max(call.results[i].dtype.itemsize, 1)
        assert not differ.size, (
            f"{call}: result {i} depends on what was in memory at elements {np.unique(differ)[:5]}, "
            f"{np.unique(differ).size} in all"
        )


def memory_of(memory: dict[str, Any], half: str) -> Any:
    """A half's memory, from the fixture `memory`; without a GPU the test is skipped."""
    return memory.get(half) or pytest.skip("no GPU")
