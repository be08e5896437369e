"""Compares memory by one memcmp, without the interpreter's lock. Views are of writable, contiguous memory."""

import ctypes

_libc = ctypes.CDLL(None)
_libc.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


def is_zero(view: memoryview) -> bool:
    """Whether the first byte is zero, and each other is like the one before it."""
    if not view.nbytes:
        return True
    at = _address(view)
    return view[0] == 0 and _libc.memcmp(at, at + 1, view.nbytes - 1) == 0


def equal(one: memoryview, other: memoryview) -> bool:
    """Views of the same length. (Python's own == compares item by item, a hundred times slower.)"""
    return not one.nbytes or _libc.memcmp(_address(one), _address(other), one.nbytes) == 0


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
