"""Zstandard frames (RFC 8878) of known size, decompressed straight into the caller's buffer, without the interpreter's lock.

The `zstandard` package returns new memory, which must then be copied. The system's libzstd, which every Debian has (dpkg needs
it), writes into given memory. Where it is missing, the package is used.
"""

import ctypes
import threading
from collections.abc import Sequence
from typing import Any

from synvirt.disks.packed import Damaged
from synvirt.disks.packed.batches import Stream, address, addresses, unpack_each, unpack_one

# A window larger than any cluster is useless to an honest writer, and costs memory for a hostile one.
_WINDOW_BYTES_MAX = 8 << 20

_threads = threading.local()


def decompress(stream: memoryview, into: memoryview) -> int:
    """Decompresses the first frame of `stream`, and gives how many bytes of `into` it filled. What follows the frame is
    ignored.

    A frame with more content than `into`, or bytes that are no frame, are Damaged. Both buffers are writable and contiguous.
    """
    if not stream.nbytes or not into.nbytes:
        raise Damaged("it is empty")
    return _by_package(stream, into) if LIBZSTD is None else LIBZSTD.decompress(stream, into)


def decompress_each(packed: memoryview, streams: Sequence[Stream], into: memoryview) -> None:
    """Decompresses a batch of frames (`batches.Each`). Damaged."""
    if LIBZSTD is None:
        unpack_each(decompress, packed, streams, into)
    else:
        LIBZSTD.decompress_each(packed, streams, into)


class _Library:
    """libzstd's stable functions (zstd.h)."""

    def __init__(self) -> None:
        library = ctypes.CDLL("libzstd.so.1")
        # These calls take a microsecond and keep the interpreter's lock: to release it could mean waiting for it.
        quick = ctypes.PyDLL("libzstd.so.1")
        self._is_error = _typed(quick.ZSTD_isError, ctypes.c_uint, ctypes.c_size_t)
        self._error_name = _typed(quick.ZSTD_getErrorName, ctypes.c_char_p, ctypes.c_size_t)
        self._frame_bytes = _typed(quick.ZSTD_findFrameCompressedSize, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t)
        self.create = _typed(library.ZSTD_createDCtx, ctypes.c_void_p)
        self.free = _typed(library.ZSTD_freeDCtx, ctypes.c_size_t, ctypes.c_void_p)
        self._decompress = _typed(
            library.ZSTD_decompressDCtx,
            ctypes.c_size_t,
            *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t),
        )

    def decompress(self, stream: memoryview, into: memoryview) -> int:
        source = address(stream)
        length = self._checked(self._frame_bytes(source, stream.nbytes))
        filled: int = self._decompress(self._context(), address(into), into.nbytes, source, length)
        return self._checked(filled)

    def decompress_each(self, packed: memoryview, streams: Sequence[Stream], into: memoryview) -> None:
        context, frame_bytes, decompress_frame = self._context(), self._frame_bytes, self._decompress
        for stream, (source, length, target, size) in zip(streams, addresses(packed, streams, into), strict=True):
            frame = frame_bytes(source, length)
            # An error is a number greater than any length.
            if frame > length or decompress_frame(context, target, size, source, frame) != size:
                unpack_one(decompress, packed, stream, into)

    def _context(self) -> int:
        """This thread's."""
        context: _Context | None = getattr(_threads, "context", None)
        if context is None:
            context = _threads.context = _Context(self)
        return context.handle

    def _checked(self, result: int) -> int:
        if self._is_error(result):
            raise Damaged(self._error_name(result).decode("ascii", "replace"))
        return result


class _Context:
    """One per thread: libzstd keeps its tables in it."""

    def __init__(self, library: _Library) -> None:
        self._library = library
        self.handle: int = library.create()
        if not self.handle:
            raise MemoryError

    def __del__(self) -> None:
        if self.handle:
            self._library.free(self.handle)


def _typed(function: Any, result: type, *arguments: type) -> Any:
    function.restype, function.argtypes = result, arguments
    return function


def _library() -> _Library | None:
    try:
        return _Library()
    except (OSError, AttributeError):
        return None


LIBZSTD = _library()


def _by_package(stream: memoryview, into: memoryview) -> int:
    import zstandard

    # Two threads may not use one decompressor at once; making one costs more than a small cluster.
    decompressor: zstandard.ZstdDecompressor | None = getattr(_threads, "decompressor", None)
    if decompressor is None:
        decompressor = _threads.decompressor = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES_MAX)
    try:
        # The package trusts the size in a frame and allocates that much, so it is checked first.
        if zstandard.frame_content_size(stream) > len(into):
            raise Damaged(f"it holds over {len(into)} bytes")
        data = decompressor.decompress(stream, max_output_size=len(into), allow_extra_data=True)
    except zstandard.ZstdError as error:
        raise Damaged(str(error)) from error
    into[: len(data)] = data
    return len(data)
