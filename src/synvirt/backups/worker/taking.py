"""Stores a guest's disk in a repository: what has changed since the base, if that is known, else all of it.

    areas that changed ─▶ whole chunks ─▶ samples of the others are looked at ─▶ read; the others keep their names
             └──────── any doubt ────────────────┴──────────────▶ the whole disk is read, and the run warns

Neither the list of changes nor the repository's copy of the rest is trusted. Of the chunks that should be unchanged, a run
checks SAMPLES at random on each disk, and the next SLICE_CHUNKS in a row, from where the run before stopped. So a list that is
wrong about a part f of the disk is detected at once with a chance of 1 - (1 - f)^64, and for certain after the rows have
covered the disk: 30 runs for 7.5 GiB. That is 320 MiB to read, for any disk size. The last chunk with data is looked at by each
run: a disk that was shrunk and got its old size again is zeros from somewhere on, and QEMU's bitmaps do not have that.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

from synvirt.blocks import DiskReader, Extent
from synvirt.copying import Copied, copy
from synvirt.disks.changed import ChangedReader
from synvirt.disks.raw.changes import opening
from synvirt.errors import Cancelled, DeltaFallback, HostPathRejected, SourceReadFailed, SourceRunning, SynvirtError
from synvirt.repository.disk import Before, Chunks, ChunkWriter
from synvirt.repository.keys import CHUNK_BYTES
from synvirt.repository.manifest import NONE, PAGE_CHUNKS, DiskMap, Manifest, Named, chunks_of
from synvirt.repository.repository import Repository
from synvirt.repository.session import Session

SAMPLES = 64
SLICE_CHUNKS = 256
# All that a session writes becomes durable with its manifest: nothing is flushed before.
NEVER_S = 1e9
_ELSEWHERE = "back the guest up while it runs; or put all files of the disk into one folder, or into one file: qemu-img convert"


@dataclass(frozen=True)
class ToTake:
    """A disk of a guest. `changed`: what may differ from the base's disk of the same target, in any order; it may raise a
    SynvirtError, which says why that is not known after all. `whole_because`: why the changes are not known; empty, if
    nobody expected them to be. `stored`: the chunks that an interrupted run has named already, of files as they are now
    (`Files.found`); `on_named` gets the others."""

    target: str
    open: Callable[[], DiskReader]
    changed: Callable[[], Iterable[Extent]] | None = None
    whole_because: str = ""
    stored: Callable[[tuple[str, ...]], Mapping[int, bytes]] = lambda files: {}
    on_named: Callable[[int, bytes], None] = lambda number, name: None


@dataclass(frozen=True)
class Taken:
    """`read_bytes`: of the disk, without the samples; `resumed_bytes`: read by an earlier run. `whole`: no chunk was taken from
    the base without reading."""

    disk: DiskMap
    read_bytes: int
    whole: bool
    checked_to: int
    resumed_bytes: int = 0


def take(
    disk: ToTake,
    base: Manifest | None,
    repository: Repository,
    session: Session,
    *,
    stop: Callable[[], bool],
    on_progress: Callable[[Copied], None],
    doubt: Callable[[str], None],
    threads: int | None = None,
    bandwidth_bps: int | None = None,
) -> Taken:
    """`doubt` gets the reason, if the changes are not known after all. SourceReadFailed, Cancelled, and errors of a session.
    SourceRunning: a file of the disk was written to meanwhile, for example a backing file that it shares with another guest."""
    try:
        with opening() as files:
            reader = disk.open()
    except SynvirtError as error:
        raise _unread(disk, error) from error
    try:
        plan = None
        try:
            plan = _planned(disk, reader, base, repository, stop)
        except Cancelled:
            raise
        except SynvirtError as error:
            doubt(f"disk {disk.target}: {error.detail}")
        before, changed = (None, None) if plan is None else (plan.before, plan.changed)
        writer = ChunkWriter(session, reader.size, before=before, changed=changed, on_named=disk.on_named)
        resumed = _resume(disk.stored(files.found), writer, session, reader.size, changed)
        partly = _partly(reader, changed, resumed)
        try:
            # Not fresh: every byte comes, zeros too, so that each chunk knows when it is complete.
            copied = copy(
                partly,
                writer,
                fresh=False,
                threads=threads,
                bandwidth_bps=bandwidth_bps,
                flush_every_s=NEVER_S,
                stop=stop,
                on_progress=on_progress,
            )
        except SynvirtError as error:
            if error.code.startswith("E_BAK_") or isinstance(error, Cancelled):
                raise
            raise _unread(disk, error) from error
        try:
            files.refuse_changed()
        except SynvirtError as error:
            raise SourceRunning(f"disk {disk.target}: {error.detail}", hint=error.hint) from error
        checked_to = 0 if plan is None else plan.checked_to
        return Taken(writer.finish(), copied.bytes_done, plan is None, checked_to, len(resumed) * CHUNK_BYTES)
    finally:
        reader.close()


def _resume(stored: Mapping[int, bytes], writer: ChunkWriter, session: Session, size: int, changed: Chunks | None) -> set[int]:
    """The chunks that can be skipped: the interrupted run has stored them, and the repository still has them."""
    resumed = set()
    for number, name in stored.items():
        if number < chunks_of(size) and (changed is None or number in changed) and session.rely_on(name):
            writer.stored(number, name)
            resumed.add(number)
    return resumed


def _partly(reader: DiskReader, changed: Chunks | None, resumed: set[int]) -> DiskReader:
    if not resumed:
        return reader if changed is None else ChangedReader(reader, changed.areas())
    left = Chunks(reader.size)
    if changed is None:
        left.add(0, reader.size)
    else:
        for start, length in changed.areas():
            left.add(start, length)
    for number in resumed:
        left.discard(number)
    return ChangedReader(reader, left.areas())


def _unread(disk: ToTake, error: SynvirtError) -> SourceReadFailed:
    if isinstance(error, HostPathRejected):
        named = error.detail.replace("the import root", "the folder of the image")  # here that is all that it may name
        return SourceReadFailed(f"disk {disk.target}: its image needs a file that is not opened: {named}", hint=_ELSEWHERE)
    return SourceReadFailed(f"disk {disk.target}: {error.detail}", hint=error.hint)


@dataclass(frozen=True)
class _Plan:
    before: Before
    changed: Chunks
    checked_to: int


def _planned(
    disk: ToTake, reader: DiskReader, base: Manifest | None, repository: Repository, stop: Callable[[], bool]
) -> _Plan | None:
    """The planned areas. None, if the whole disk was expected anyway. SynvirtError, with the reason, for any doubt."""
    if disk.whole_because:
        raise DeltaFallback(disk.whole_because)
    if disk.changed is None or base is None:
        return None
    found = _in_base(base, disk.target)
    if found is None:
        return None
    shown, named = found
    if shown.size_bytes != reader.size:
        raise DeltaFallback(f"it was resized from {shown.size_bytes} to {reader.size} bytes")
    if repository.unreadable:
        raise DeltaFallback("packs of the repository cannot be read, and their content is needed again")
    before, changed = Before(repository, shown), Chunks(reader.size)
    for extent in disk.changed():
        if extent.zero:
            changed.add_zeros(extent.start, extent.length, before)
        else:
            changed.add(extent.start, extent.length)
    for number in _samples(reader.size, named.checked_to, before, changed):
        if stop():
            raise Cancelled
        _check(reader, before, number, repository)
    return _Plan(before, changed, (named.checked_to + SLICE_CHUNKS) % max(chunks_of(reader.size), 1))


def _in_base(base: Manifest, target: str) -> tuple[DiskMap, Named] | None:
    both = zip(base.shown.disks, base.sealed.disks, strict=True)
    return next(((shown, named) for shown, named in both if named.target == target), None)


def _samples(size: int, checked_to: int, before: Before, changed: Chunks) -> Iterator[int]:
    count = chunks_of(size)
    by_chance = random.SystemRandom().sample(range(count), min(SAMPLES, count))
    in_a_row = ((checked_to + step) % count for step in range(min(SLICE_CHUNKS, count)))
    chosen = {*by_chance, *in_a_row, *islice(_with_data_from_the_end(count, before, changed), 1)}
    return (number for number in sorted(chosen) if number not in changed)


def _with_data_from_the_end(count: int, before: Before, changed: Chunks) -> Iterator[int]:
    """The chunks that should be unchanged and are not zeros, the last one first."""
    for which in reversed(range(len(before.disk.pages))):
        if bytes.fromhex(before.disk.pages[which]) != NONE:
            for number in reversed(range(which * PAGE_CHUNKS, min((which + 1) * PAGE_CHUNKS, count))):
                if number not in changed and before.name(number) != NONE:
                    yield number


def _check(reader: DiskReader, before: Before, number: int, repository: Repository) -> None:
    offset = number * CHUNK_BYTES
    content = bytearray(min(CHUNK_BYTES, reader.size - offset))
    reader.read_into(offset, memoryview(content))
    wanted = before.name(number)
    if wanted != NONE and repository.place(wanted) is None:
        raise DeltaFallback(f"its bytes from offset {offset} on are missing from the repository")
    same = content.count(0) == len(content) if wanted == NONE else repository.keys.chunk_name(content) == wanted
    if not same:
        raise DeltaFallback(f"its bytes from offset {offset} on have changed, although they were reported as unchanged")
