"""Facts of an image, for people: each reader of a format has its own, and `disk info` shows them.

layer_of(reader) ─▶ Layer(qcow2, {cluster_bytes: 65536, …}) ─▶ beneath: Layer(…) ─▶ … ─▶ None
"""

from typing import Any, Protocol, runtime_checkable

from synvirt.blocks import DiskReader
from synvirt.records import Record, field


class Layer(Record):
    """One image of a chain. `facts` are JSON values, with the unit in their names; `beneath` is the image under this one, its
    parent or backing file."""

    name: str
    format: str
    size_bytes: int
    facts: dict[str, Any] = field(default_factory=dict)
    beneath: "Layer | None" = None

    def chain(self) -> list["Layer"]:
        """This image, and all under it."""
        return [self, *(self.beneath.chain() if self.beneath else [])]


@runtime_checkable
class Layered(Protocol):
    """A DiskReader with facts of its image."""

    def layer(self) -> Layer: ...


@runtime_checkable
class Checkable(Protocol):
    """A reader that finds a file that was cut off only where it reads it, or if it is asked."""

    def check_whole(self) -> None: ...


def check_whole(reader: object) -> None:
    """DiskReadFailed, where a file of the disk ends before what its tables name. Readers of other formats raise it by
    themselves."""
    if isinstance(reader, Checkable):
        reader.check_whole()


def layer_of(reader: DiskReader | None, name: str = "") -> Layer | None:
    """None for None. A reader without facts is a raw disk."""
    if reader is None:
        return None
    return reader.layer() if isinstance(reader, Layered) else Layer(name=name, format="raw", size_bytes=reader.size)
