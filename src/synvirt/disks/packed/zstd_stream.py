"""Zstandard (RFC 8878) as a stream, by the system's libzstd (zstd.h, «Streaming decompression»).

The `zstandard` package does not report that a stream ended within a frame, so a cut file would look complete. libzstd reports
it, and fills the caller's buffer without the interpreter's lock.
"""

import ctypes
from typing import Any, Final

from synvirt.disks.packed import Damaged
from synvirt.errors import UnsupportedFormat

# The zstd program's own limit: windows of 128 MiB. Larger ones (--long=28 and up) let a hostile file take memory.
_WINDOW_LOG_MAX: Final = 27
_ZSTD_D_WINDOW_LOG_MAX: Final = 100  # zstd.h, enum ZSTD_dParameter
# The most that one call returns.
_CONTENT_BYTES: Final = 1 << 20


class _Buffer(ctypes.Structure):
    """ZSTD_inBuffer and ZSTD_outBuffer: the same three fields."""

    _fields_ = (("address", ctypes.c_void_p), ("size", ctypes.c_size_t), ("position", ctypes.c_size_t))


class ZstdDecoder:
    """The zstd program joins several frames to one content; skippable frames are skipped."""

    def __init__(self) -> None:
        self._context: int | None = None
        try:
            self._library = ctypes.CDLL("libzstd.so.1")
        except OSError as error:
            raise UnsupportedFormat("zstd files need the system's libzstd", hint="apt install libzstd1") from error
        library = self._library
        signatures: tuple[tuple[Any, ...], ...] = (
            (library.ZSTD_isError, ctypes.c_uint, ctypes.c_size_t),
            (library.ZSTD_getErrorName, ctypes.c_char_p, ctypes.c_size_t),
            (library.ZSTD_createDCtx, ctypes.c_void_p),
            (library.ZSTD_freeDCtx, ctypes.c_size_t, ctypes.c_void_p),
            (library.ZSTD_DCtx_setParameter, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int, ctypes.c_int),
            (library.ZSTD_decompressStream, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p),
        )
        for function, result, *arguments in signatures:
            function.restype, function.argtypes = result, arguments
        self._context = library.ZSTD_createDCtx()
        if not self._context:
            raise MemoryError
        self._checked(library.ZSTD_DCtx_setParameter(self._context, _ZSTD_D_WINDOW_LOG_MAX, _WINDOW_LOG_MAX))
        self._source = b""
        self._content = bytearray(_CONTENT_BYTES)
        self._from = _Buffer()
        self._flushed = True
        self.between = False

    @property
    def hungry(self) -> bool:
        return self._flushed and self._from.position == len(self._source)

    def decode(self, source: bytes, length: int) -> bytes:
        """At most `length` bytes of the content of `source`, or, where it is empty, of earlier source."""
        if source:
            self._source = source
            self._from = _Buffer(ctypes.cast(ctypes.c_char_p(source), ctypes.c_void_p), len(source), 0)
        length = min(length, _CONTENT_BYTES)
        into = _Buffer(ctypes.addressof(ctypes.c_char.from_buffer(self._content)), length, 0)
        left = self._library.ZSTD_decompressStream(self._context, ctypes.byref(into), ctypes.byref(self._from))
        # 0: a frame has ended, and all of it was returned. If the buffer is full, libzstd may have more.
        self.between = self._checked(left) == 0
        self._flushed = self.between or into.position < length
        return bytes(memoryview(self._content)[: into.position])

    def _checked(self, result: int) -> int:
        if self._library.ZSTD_isError(result):
            raise Damaged(self._library.ZSTD_getErrorName(result).decode("ascii", "replace"))
        return result

    def __del__(self) -> None:
        if self._context:
            self._library.ZSTD_freeDCtx(self._context)
