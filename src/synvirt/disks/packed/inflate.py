"""Inflating, straight into the caller's buffer and without holding the interpreter's lock.

libdeflate is the fastest inflater for pieces of known size, and Python's `deflate` package contains it. But that package holds
the lock and returns new memory, so its library is called directly (ctypes releases the lock). Where a build of the package
hides the library's names, isal is used, which is a quarter slower.
"""

import ctypes
import threading
from collections.abc import Sequence
from typing import Final, cast

import deflate

from synvirt.disks.packed import Damaged
from synvirt.disks.packed.batches import One, Stream, address, addresses, unpack_each, unpack_one

# libdeflate.h, enum libdeflate_result.
_SUCCESS = 0
# zlib's window bits; negative for a stream without a header.
_RAW: Final = -15
_ZLIB: Final = 15


def inflate_raw(stream: memoryview, into: memoryview) -> int:
    """Inflates a raw deflate stream (RFC 1951), and gives how many bytes of `into` it filled.

    What follows the stream in `stream` is ignored, and nothing is written past `into`: a longer content is cut there. Both
    buffers are writable and contiguous (views of a bytearray). Damaged.
    """
    return _inflate(_RAW, stream, into)


def inflate_zlib(stream: memoryview, into: memoryview) -> int:
    """The same for a zlib stream (RFC 1950), whose checksum is verified unless it is cut."""
    return _inflate(_ZLIB, stream, into)


def inflate_each_raw(packed: memoryview, streams: Sequence[Stream], into: memoryview) -> None:
    """Inflates a batch of raw deflate streams (`batches.Each`). Damaged."""
    _inflate_each(_RAW, inflate_raw, packed, streams, into)


def inflate_each_zlib(packed: memoryview, streams: Sequence[Stream], into: memoryview) -> None:
    """The same for zlib streams."""
    _inflate_each(_ZLIB, inflate_zlib, packed, streams, into)


class _Library:
    """libdeflate's functions, found in the `deflate` package's own shared object."""

    def __init__(self) -> None:
        library = ctypes.CDLL(deflate._deflate.__file__)  # noqa: SLF001
        self.alloc = library.libdeflate_alloc_decompressor
        self.alloc.argtypes, self.alloc.restype = [], ctypes.c_void_p
        self.free = library.libdeflate_free_decompressor
        self.free.argtypes, self.free.restype = [ctypes.c_void_p], None
        self.decompress = {_RAW: library.libdeflate_deflate_decompress, _ZLIB: library.libdeflate_zlib_decompress}
        for function in self.decompress.values():
            function.argtypes = [
                *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t),
                *(ctypes.c_void_p, ctypes.c_size_t, ctypes.POINTER(ctypes.c_size_t)),
            ]
            function.restype = ctypes.c_int


class _Decompressor:
    """One per thread: libdeflate keeps its tables in it."""

    def __init__(self, library: _Library) -> None:
        self._library = library
        self._state = library.alloc()
        if not self._state:
            raise MemoryError
        self._filled = ctypes.c_size_t()

    def __call__(self, kind: int, stream: memoryview, into: memoryview) -> int:
        """How many bytes were filled; -1, when libdeflate refuses for any reason."""
        decompress = self._library.decompress[kind]
        result = decompress(self._state, address(stream), stream.nbytes, address(into), into.nbytes, self._filled)
        return self._filled.value if result == _SUCCESS else -1

    def each(self, kind: int, one: One, packed: memoryview, streams: Sequence[Stream], into: memoryview) -> None:
        """Inflates a batch; what libdeflate refuses, by `one`. Damaged."""
        decompress, state, filled = self._library.decompress[kind], self._state, self._filled
        for stream, (source, length, target, size) in zip(streams, addresses(packed, streams, into), strict=True):
            if decompress(state, source, length, target, size, filled) or filled.value != size:
                unpack_one(one, packed, stream, into)

    def __del__(self) -> None:
        if self._state:
            self._library.free(self._state)


def _library() -> _Library | None:
    try:
        return _Library()
    except (AttributeError, OSError):
        return None


LIBDEFLATE = _library()
_threads = threading.local()


def _own(library: _Library) -> _Decompressor:
    """This thread's."""
    decompressor: _Decompressor | None = getattr(_threads, "decompressor", None)
    if decompressor is None:
        decompressor = _threads.decompressor = _Decompressor(library)
    return decompressor


def _inflate_each(kind: int, one: One, packed: memoryview, streams: Sequence[Stream], into: memoryview) -> None:
    if LIBDEFLATE is None:
        unpack_each(one, packed, streams, into)
    else:
        _own(LIBDEFLATE).each(kind, one, packed, streams, into)


def _inflate(kind: int, stream: memoryview, into: memoryview) -> int:
    if not stream.nbytes or not into.nbytes:
        raise Damaged("it is empty")
    if LIBDEFLATE is not None:
        filled = _own(LIBDEFLATE)(kind, stream, into)
        if filled >= 0:
            return filled
    # libdeflate refuses a stream that goes on past `into`, and gives no reason for a damaged one.
    return _inflate_patiently(kind, stream, into)


def _inflate_patiently(kind: int, stream: memoryview, into: memoryview) -> int:
    # Loaded here: most images never need it.
    from isal import isal_zlib

    # isal's type stubs call its exception class an exception.
    isal_error = cast(type[Exception], isal_zlib.error)
    try:
        data: bytes = isal_zlib.decompressobj(kind).decompress(stream, into.nbytes)
    except isal_error as error:
        raise Damaged(str(error)) from error
    into[: len(data)] = data
    return len(data)
