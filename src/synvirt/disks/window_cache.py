"""The parts of images' mappings that were used last, one cache for a whole chain: a long chain needs no more memory."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

W = TypeVar("W")


class WindowCache(Generic[W]):
    """The `most` windows that were used last. A window is a part of a mapping that is read at once. For several threads."""

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
