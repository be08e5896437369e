"""Entries of the tables by which images say where their blocks lie: read as arrays, and compared in stretches. And the parts of
such tables that were used last."""

import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Generic, Literal, TypeVar

W = TypeVar("W")

# Entries of 32 or 64 bits ("I" or "Q"), without a sign. Python 3.11 knows no `array[int]`, and a string would be compiled where
# a named tuple has such a field: the first one costs a millisecond.
if TYPE_CHECKING:
    Entries = array[int]
else:
    Entries = array
# Entries that are compared at once.
STRETCH: Final = 256
# The entries 1, 1, 1, … and the entries 0, 1, 2, …, each read as one long number; by the size of an entry in bytes.
_STRETCHES: Final = {
    array(code).itemsize: tuple(
        int.from_bytes(stretch, sys.byteorder) for stretch in (array(code, [1]) * STRETCH, array(code, range(STRETCH)))
    )
    for code in "IQ"
}


def entries_of(content: bytes | bytearray, code: Literal["I", "Q"], order: Literal["little", "big"]) -> Entries:
    """The entries of a part of a table, which has whole entries of 4 ("I") or 8 ("Q") bytes."""
    entries = array(code)
    entries.frombytes(content)
    if order != sys.byteorder:
        entries.byteswap()
    return entries


def goes_on(stretch: Entries, follows: int, step: int) -> bool:
    """Whether a whole stretch is follows, follows + step, … Compared as one long number, in a fifth of a loop's time.

    Only stretches of STRETCH entries are compared, and none whose numbers would not fit: one would carry into the next.
    """
    if len(stretch) < STRETCH or stretch[0] != follows or follows + STRETCH * step > 1 << 8 * stretch.itemsize:
        return False
    ones, ramp = _STRETCHES[stretch.itemsize]
    return int.from_bytes(stretch, sys.byteorder) == follows * ones + step * ramp


class WindowCache(Generic[W]):
    """The `most` windows that were used last. A window is a part of a mapping that is read at once. One cache is for a whole
    chain, so that a long chain needs no more memory. For several threads."""

    def __init__(self, most: int) -> None:
        self._windows: OrderedDict[tuple[object, int], W] = OrderedDict()
        self._most, self._lock = most, threading.Lock()

    def get(self, owner: object, index: int, load: Callable[[], W]) -> W:
        """The window of that number in the mapping `owner`; `load` reads it, where it is not kept."""
        key = (owner, index)
        with self._lock:
            held = self._windows.get(key)
            if held is not None:
                self._windows.move_to_end(key)
                return held
        loaded = load()  # outside the lock: two threads may load the same one, which costs less than waiting
        with self._lock:
            self._windows[key] = loaded
            if len(self._windows) > self._most:
                self._windows.popitem(last=False)
        return loaded
