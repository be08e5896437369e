"""The order in which firmware finds the disks of a VM, where nobody named one."""

from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


def by_bus(disks: Iterable[T], bus: Callable[[T], str], place: Callable[[T], tuple[int, ...]]) -> list[T]:
    """The disks of each bus by their places on it; the buses as they come first in the platform's list, which has the disks in
    any order."""
    listed = list(disks)
    buses = list(dict.fromkeys(map(bus, listed)))
    return sorted(listed, key=lambda disk: (buses.index(bus(disk)), place(disk)))
