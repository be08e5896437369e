"""A full check of change tracking: all that the source reports as unchanged is read on both sides and compared.

    reader ─▶ what its extents leave out ─▶ copy() ─▶ a writer that compares and writes nothing
                                              │ a block whose hash is the ledger's is the same: the copy is not read

`sampling` reads some of it in each pass. This reads all of it once, while the guest still runs, and says what the sample would
have missed. It compares with what was copied. Whether the volume still has that is for the volume's verification.
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

# The most extents in the result: enough to see a pattern, few enough for a message.
EXTENTS_NAMED = 8
# The most kept while comparing: threads find them in no order, and neighbours are joined.
EXTENTS_KEPT = 1024


@dataclass(frozen=True, slots=True)
class Differing:
    """`checked_bytes` were compared. `blocks` of BLOCK_BYTES differ; `extents`: the first of them, in whole blocks."""

    checked_bytes: int
    blocks: int
    extents: tuple[Extent, ...]

    def missed_by_sample(self, delta_bytes: int) -> float:
        """The chance that the sample of a pass which copied `delta_bytes` finds none of them: 0 to 1."""
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
    """Compares `volume` with all that the extents of `source` leave out. `known`: the present hash of a block of the volume, of
    the ledger's size. DiskReadFailed; Cancelled, once `stop()` is true."""
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
    """`over`, with whole blocks of the ledger where their hashes are known; `same` are the blocks with the known hash. What
    changed in such a block was copied from this very moment, so it is equal on both sides, too."""

    def __init__(self, over: UnchangedReader, known: Callable[[int], bytes | None]) -> None:
        super().__init__(over)
        self._known = known
        self.same: set[int] = set()
        # Bytes beyond those that the source reports as unchanged, after all extents were read.
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
        """Does nothing: the owner closes it."""


class _Comparison:
    """A writer that only compares: the bytes must be there already. `same`: equal blocks of the ledger."""

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
        """The volume belongs to its opener."""

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
    """Joins neighbouring and overlapping extents."""
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
    """The starts of the blocks that these bytes touch."""
    return range(offset - offset % BLOCK_BYTES, offset + length, BLOCK_BYTES)


def _part(view: memoryview, at: int, offset: int) -> memoryview:
    return view[max(0, at - offset) : at + BLOCK_BYTES - offset]


def _same(present: bytearray, buffer: memoryview, at: int, offset: int) -> bool:
    return _part(memoryview(present), at, offset) == _part(buffer, at, offset)
