"""What a copy asks its two sides for, and how often."""

from collections.abc import Iterator

import pytest

from synvirt import copying
from synvirt.blocks import Extent
from synvirt.copying import copy
from tests.fakes.disks import BLOCK_BYTES, MemoryReader, MemoryWriter

REQUEST_BYTES = 4 * BLOCK_BYTES


@pytest.fixture(autouse=True)
def small_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "REQUEST_BYTES", REQUEST_BYTES)


class CountedReader(MemoryReader):
    """How often its extents were asked for."""

    asked = 0

    def extents(self) -> Iterator[Extent]:
        self.asked += 1
        yield from super().extents()


def test_a_short_list_of_extents_is_made_once() -> None:
    reader = CountedReader("A--B")
    copy(reader, MemoryWriter(reader.size))
    assert reader.asked == 1


def test_a_long_list_of_extents_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "KEPT_EXTENTS_MAX", 2)
    reader = CountedReader("A--B")
    writer = MemoryWriter(reader.size)
    copy(reader, writer)
    assert writer.durable == reader.content
    assert reader.asked == 2
