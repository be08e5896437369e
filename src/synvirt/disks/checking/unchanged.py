"""A full check of change tracking: everything that the source calls unchanged is read there and here, and compared.

    reader ─▶ what its extents leave out ─▶ copy() ─▶ a writer that compares and writes nothing
                                              │ a block whose hash is the ledger's is the same: the copy is not read

`sampling` looks at some of it in each pass. This looks at all of it, once, while the guest still runs, and says what that
sample would have missed. It compares with what was copied: that the volume still holds it is for who verifies the volume.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from synvirt.blocks import DiskReader, Extent
from synvirt.copying import Copied, copy
from synvirt.disks.changed import Over, UnchangedReader
from synvirt.disks.checking import ledger
from synvirt.disks.checking.block_hashes import digest_of
from synvirt.disks.checking.sampling import BLOCK_BYTES, blocks_to_check
from synvirt.disks.memory import is_zero
from synvirt.errors import DiskWriteFailed

# Of the extents that differ so many are named: enough to look for a pattern, few enough for a message.
EXTENTS_NAMED = 8
# And so many are kept while it is compared: threads find them in no order, and neighbours become one.
EXTENTS_KEPT = 1024


@dataclass(frozen=True, slots=True)
class Differing:
    """`checked_bytes` were compared. `blocks` of BLOCK_BYTES differ; `extents`: the first of where, of whole blocks."""

    checked_bytes: int
    blocks: int
    extents: tuple[Extent, ...]

    def missed_by_sample(self, delta_bytes: int) -> float:
        """How likely it was that the sample of a pass which copied `delta_bytes` sees none of them: 0 to 1."""
        share = self.blocks / max(1, -(-self.checked_bytes // BLOCK_BYTES))
        return float(max(0.0, 1 - share) ** blocks_to_check(delta_bytes))


def all_unchanged(
    source: DiskReader,
    volume: DiskReader,
    *,
    known: Callable[[int], bytes | None] = lambda block: None,
    threads: int | None = None,
    bandwidth_bps: int | None = None,
    shared: Callable[[int], None] | None = None,
    stop: Callable[[], bool] = lambda: False,
    on_progress: Callable[[Copied], None] = lambda copied: None,
) -> Differing:
    """`volume` compared with all that the extents of `source` leave out. `known`: the hash of a block of the ledger's size, as
    the volume has it by now. DiskReadFailed; Cancelled, once `stop()` is true."""
    reader = _Hashing(UnchangedReader(source), known)
    compared = _Comparison(volume, reader.same)
    done = copy(
        reader,
        compared,
        fresh=False,
        threads=threads,
        bandwidth_bps=bandwidth_bps,
        shared=shared,
        stop=stop,
        on_progress=on_progress,
    )
    return Differing(done.bytes_done - reader.added_bytes, compared.blocks, tuple(compared.extents[:EXTENTS_NAMED]))


class _Hashing(Over):
    """`over`, with whole blocks of the ledger where their hashes are known; `same` are those that have theirs. What changed in
    such a block was copied of this very moment: it is the same on both sides, too."""

    def __init__(self, over: UnchangedReader, known: Callable[[int], bytes | None]) -> None:
        super().__init__(over)
        self._known = known
        self.same: set[int] = set()
        # Beyond what the source calls unchanged, once the extents were gone through.
        self.added_bytes = 0

    def extents(self) -> Iterator[Extent]:
        at = added = 0
        for extent in self._over.extents():
            first, last = extent.start // ledger.BLOCK_BYTES, (extent.end - 1) // ledger.BLOCK_BYTES
            start = first * ledger.BLOCK_BYTES if self._known(first) else extent.start
            end = min((last + 1) * ledger.BLOCK_BYTES, self.size) if self._known(last) else extent.end
            if (start := max(start, at)) < end:
                yield Extent(start, end - start)
                added += end - start
                at = end
            added -= extent.length
        self.added_bytes = added

    def read_into(self, offset: int, buffer: memoryview) -> None:
        super().read_into(offset, buffer)
        for block in range(-(-offset // ledger.BLOCK_BYTES), -(-(offset + len(buffer)) // ledger.BLOCK_BYTES)):
            at = block * ledger.BLOCK_BYTES - offset
            length = min(ledger.BLOCK_BYTES, self.size - block * ledger.BLOCK_BYTES)
            if at + length <= len(buffer) and (digest := self._known(block)) and digest == digest_of(buffer[at : at + length]):
                self.same.add(block)

    def close(self) -> None:
        """It is its owner's."""


class _Comparison:
    """A writer that only looks: what is written must be there already. `same`: blocks of the ledger that are."""

    def __init__(self, volume: DiskReader, same: set[int]) -> None:
        self._volume, self._same = volume, same
        self._lock = threading.Lock()
        self.blocks = 0
        self.extents: list[Extent] = []

    @property
    def size(self) -> int:
        return self._volume.size

    @property
    def max_writers(self) -> int:
        return self._volume.max_readers

    def write(self, offset: int, buffer: memoryview) -> None:
        if self._is_same(offset, len(buffer)):
            return
        present = self._there(offset, len(buffer))
        if present != buffer:  # one memcmp
            self._note([at for at in _blocks(offset, len(buffer)) if not _same(present, buffer, at, offset)])

    def zero(self, offset: int, length: int) -> None:
        if self._is_same(offset, length):
            return
        present = memoryview(self._there(offset, length))
        if not is_zero(present):
            self._note([at for at in _blocks(offset, length) if not is_zero(_part(present, at, offset))])

    def flush(self) -> None:
        """Nothing is written."""

    def close(self) -> None:
        """The volume belongs to who opened it."""

    def _is_same(self, offset: int, length: int) -> bool:
        return all(
            block in self._same for block in range(offset // ledger.BLOCK_BYTES, -(-(offset + length) // ledger.BLOCK_BYTES))
        )

    def _there(self, offset: int, length: int) -> bytearray:
        if not 0 <= offset <= self.size - length:
            raise DiskWriteFailed(f"offset {offset} lies outside the volume")
        present = bytearray(length)
        self._volume.read_into(offset, memoryview(present))
        return present

    def _note(self, places: list[int]) -> None:
        with self._lock:
            self.blocks += len(places)
            found = sorted([*self.extents, *(Extent(at, BLOCK_BYTES) for at in places)], key=lambda extent: extent.start)
            self.extents = list(_joined(found))[:EXTENTS_KEPT]


def _joined(extents: Iterable[Extent]) -> Iterator[Extent]:
    """Neighbours, and those that overlap, as one."""
    last: Extent | None = None
    for one in extents:
        if last is not None and one.start <= last.end:
            last = Extent(last.start, max(last.end, one.end) - last.start)
            continue
        if last is not None:
            yield last
        last = one
    if last is not None:
        yield last


def _blocks(offset: int, length: int) -> range:
    """Where the blocks begin that these bytes touch."""
    return range(offset - offset % BLOCK_BYTES, offset + length, BLOCK_BYTES)


def _part(view: memoryview, at: int, offset: int) -> memoryview:
    return view[max(0, at - offset) : at + BLOCK_BYTES - offset]


def _same(present: bytearray, buffer: memoryview, at: int, offset: int) -> bool:
    return _part(memoryview(present), at, offset) == _part(buffer, at, offset)
