"""Increments: what changed is read, the rest is taken by name, and who lies about it is found out or does no harm."""

import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from random import Random
from uuid import UUID, uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synvirt.backups.worker import taking
from synvirt.backups.worker.taking import Taken, ToTake, take
from synvirt.blocks import DiskReader, Extent
from synvirt.copying import Copied
from synvirt.disks import open_reader
from synvirt.disks.specs import ImageSpec, RawSpec
from synvirt.errors import Cancelled, DiskReadFailed, DiskWriteFailed, SourceReadFailed, SourceRunning, SynvirtError
from synvirt.model.values import now
from synvirt.programs import run
from synvirt.repository import manifest as manifests
from synvirt.repository.disk import Before, Chunks, ChunkWriter, PointReader
from synvirt.repository.keys import CHUNK_BYTES, NAME_BYTES
from synvirt.repository.manifest import PAGE_CHUNKS, Manifest, Mark
from synvirt.repository.repository import Repository
from synvirt.repository.session import Session
from synvirt.sizes import GIB
from tests.cases import cases
from tests.repository.folders import Counted, MemoryFolder
from tests.repository.points import opened

TARGET = "vda"


class Disk:
    """A disk of any size, zeros but for some chunks; counts the bytes that are read of it."""

    max_readers = 8

    def __init__(self, size: int, chunks: dict[int, bytes] | None = None) -> None:
        self.size, self.chunks, self.bytes_read = size, dict(chunks or {}), 0

    def extents(self) -> Iterator[Extent]:
        at = 0
        for number in sorted(self.chunks):
            if number * CHUNK_BYTES > at:
                yield Extent(at, number * CHUNK_BYTES - at, zero=True)
            at = min((number + 1) * CHUNK_BYTES, self.size)
            yield Extent(number * CHUNK_BYTES, at - number * CHUNK_BYTES)
        if at < self.size:
            yield Extent(at, self.size - at, zero=True)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        self.bytes_read += len(buffer)
        for at in range(0, len(buffer), CHUNK_BYTES):
            number, within = divmod(offset + at, CHUNK_BYTES)
            assert within == 0  # as whole chunks are read
            part = len(buffer[at : at + CHUNK_BYTES])
            buffer[at : at + part] = self.chunks.get(number, bytes(CHUNK_BYTES))[:part]

    def close(self) -> None:
        pass


class Host:
    """Backs one disk up again and again, as a run does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = MemoryFolder()
        self.repository = opened(self.folder, new=True)
        self.doubts: list[str] = []
        self.disk: DiskReader = Disk(0)

    def take(
        self,
        disk: DiskReader,
        base: Manifest | None = None,
        changed: Callable[[], list[Extent]] | None = None,
        *,
        whole_because: str = "",
        stored: Mapping[int, bytes] | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> tuple[Taken, Manifest]:
        self.disk, self.doubts = disk, []
        session = Session(self.repository)
        mark = Mark(kind="checkpoint", name="one")
        taken = take(
            ToTake(TARGET, lambda: self.disk, changed, whole_because, lambda files: stored or {}),
            base,
            self.repository,
            session,
            stop=stop,
            on_progress=lambda _: None,
            doubt=self.doubts.append,
        )
        named = manifests.Named(target=TARGET, path="/x", size_bytes=disk.size, checked_to=taken.checked_to, mark=mark)
        sealed = manifests.Sealed(
            vm_id="v", vm_name="v", consistency="crash", job_id=uuid4(), run_id=uuid4(), domain_xml="<domain/>", disks=(named,)
        )
        made = Manifest(shown=manifests.Shown(id=uuid4(), created_at=now(), disks=(taken.disk,)), sealed=sealed)
        session.commit(made)
        return taken, made

    def chunk(self, made: Manifest, number: int) -> bytes:
        reader = PointReader(self.repository, made.shown.disks[0])
        content = bytearray(min(CHUNK_BYTES, reader.size - number * CHUNK_BYTES))
        reader.read_into(number * CHUNK_BYTES, memoryview(content))
        return bytes(content)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(monkeypatch)


def chunk(seed: int) -> bytes:
    return Random(seed).randbytes(CHUNK_BYTES)


def areas(*numbers: int) -> Callable[[], list[Extent]]:
    """A byte within each of these chunks."""
    return lambda: [Extent(number * CHUNK_BYTES + 5, 1) for number in numbers]


# ── what is read ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_changed_is_read_and_the_rest_is_taken_by_name(host: Host) -> None:
    size = 40 * CHUNK_BYTES + 7
    disk = Disk(size, {0: chunk(0), 3: chunk(3), 20: chunk(20)})
    full, first = host.take(disk)
    assert (full.whole, host.doubts) == (True, [])
    changed = Disk(size, {0: chunk(0), 3: chunk(33), 39: chunk(39), 40: b"the end"})
    part, second = host.take(changed, first, areas(3, 20, 39, 40))
    assert (part.whole, host.doubts) == (False, [])
    assert part.read_bytes <= 4 * CHUNK_BYTES
    for number in range(41):
        assert host.chunk(second, number) == changed.chunks.get(number, bytes(CHUNK_BYTES))[: size - number * CHUNK_BYTES]
    assert host.chunk(first, 3) == chunk(3)  # an earlier point is what it was


def test_what_did_not_change_keeps_its_name_in_each_page_of_a_disk(host: Host) -> None:
    changed = [page * PAGE_CHUNKS + 3 for page in range(3)]
    disk = Disk(3 * GIB - 5, {number: chunk(number) for one in changed for number in (one, one + 1)})
    _, first = host.take(disk)
    after = Disk(disk.size, disk.chunks | {number: chunk(-number) for number in changed})
    _, second = host.take(after, first, areas(*changed))
    assert [number for number, content in after.chunks.items() if host.chunk(second, number) != content] == []


def test_an_unchanged_disk_costs_no_more_if_it_is_larger(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of the disk nor of the repository: bytes that are read of a disk of 8 GiB and of one of 256 GiB."""
    cost = []
    for size in (8 * GIB, 256 * GIB):
        disk = Disk(size, {0: chunk(0), 5000: chunk(1)})
        _, first = host.take(disk)
        host.repository = Repository(counted := Counted(host.folder), bytes(range(32)))
        reads: list[int] = []
        read_page = host.repository.read_page
        monkeypatch.setattr(host.repository, "read_page", lambda name, read=read_page, to=reads: (to.append(1), read(name))[1])
        disk.bytes_read = 0
        taken, _ = host.take(disk, first, list)
        assert (taken.whole, taken.read_bytes, host.doubts) == (False, 0, [])
        assert disk.bytes_read <= (taking.SAMPLES + taking.SLICE_CHUNKS + 1) * CHUNK_BYTES
        assert len(reads) <= taking.SAMPLES + taking.SLICE_CHUNKS + 1
        assert taken.disk == first.shown.disks[0]
        cost.append(counted.calls)
    assert cost[1] < 2 * cost[0] + 100


def test_what_is_zeros_now_is_read_where_it_was_not_before(host: Host) -> None:
    """A disk that is mostly holes costs nothing for them, though its list of changes has them all."""
    size = 3 * GIB
    _, first = host.take(Disk(size, {number: chunk(number) for number in (0, 1500, 1501)}))
    changed = Disk(size, {0: chunk(0), 1501: chunk(7)})
    taken, second = host.take(changed, first, lambda: [Extent(CHUNK_BYTES, size - CHUNK_BYTES, zero=True), *areas(1501)()])
    assert (taken.whole, host.doubts) == (False, [])
    assert taken.read_bytes <= 2 * CHUNK_BYTES
    for number in (0, 1, 1500, 1501, 3071):
        assert host.chunk(second, number) == changed.chunks.get(number, bytes(CHUNK_BYTES))


def test_the_rows_that_are_looked_at_go_round(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(taking, "SLICE_CHUNKS", 4)
    disk = Disk(10 * CHUNK_BYTES, {2: chunk(2)})
    taken, made = host.take(disk)
    starts = [taken.checked_to]
    for _ in range(5):
        taken, made = host.take(disk, made, list)
        starts.append(taken.checked_to)
    assert starts == [0, 4, 8, 2, 6, 0]


# ── doubts ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_who_leaves_out_a_change_is_found_by_the_row_at_the_latest(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """By chance alone, here, nothing is looked at."""
    monkeypatch.setattr(taking, "SAMPLES", 0)
    monkeypatch.setattr(taking, "SLICE_CHUNKS", 4)
    size = 10 * CHUNK_BYTES
    _, made = host.take(Disk(size, {2: chunk(2)}))
    lied_to = Disk(size, {2: chunk(2), 9: chunk(9)})
    for _ in range(2):
        taken, made = host.take(lied_to, made, list)
        assert not taken.whole
    taken, made = host.take(lied_to, made, list)
    assert taken.whole
    assert "were reported as unchanged" in host.doubts[0]
    assert host.chunk(made, 9) == chunk(9)


def test_a_few_samples_find_who_leaves_out_everything(host: Host) -> None:
    size = 50 * CHUNK_BYTES
    _, made = host.take(Disk(size, dict.fromkeys(range(50), chunk(1))))
    taken, made = host.take(Disk(size, dict.fromkeys(range(50), chunk(2))), made, list)
    assert taken.whole
    assert host.chunk(made, 30) == chunk(2)


@pytest.mark.parametrize("written_since", [(), (2999,), (2998, 2999)])
@pytest.mark.parametrize("cut_at", [1, 1000, 2997])
def test_a_disk_that_was_shrunk_and_has_its_old_size_again_is_read_whole(
    host: Host, monkeypatch: pytest.MonkeyPatch, cut_at: int, written_since: tuple[int, ...]
) -> None:
    """QEMU's bitmap has nothing of that: a bit of what was cut off is new, and clean. By chance alone, here, nothing is looked
    at."""
    monkeypatch.setattr(taking, "SAMPLES", 0)
    monkeypatch.setattr(taking, "SLICE_CHUNKS", 0)
    before = {number: chunk(number) for number in (0, 999, 1500, 2997, 2998)}
    _, made = host.take(Disk(4000 * CHUNK_BYTES, before))
    after = {number: content for number, content in before.items() if number < cut_at}
    after |= {number: chunk(-number) for number in written_since}
    disk = Disk(4000 * CHUNK_BYTES, after)
    taken, second = host.take(disk, made, areas(*written_since))
    assert [host.chunk(second, number) == disk.chunks.get(number, bytes(CHUNK_BYTES)) for number in {*before, *after}] == [
        True
    ] * len({*before, *after})
    assert taken.whole
    assert "were reported as unchanged" in host.doubts[0]


def failing() -> list[Extent]:
    raise DiskReadFailed("the bitmap cannot be read")


@pytest.mark.parametrize(
    ("size", "changed", "because", "doubt"),
    [
        (9, list, "", "resized from"),
        (11, list, "", "resized from"),
        (10, failing, "", "the bitmap cannot be read"),
        (10, lambda: [Extent(10 * CHUNK_BYTES, 1)], "", "leaves the disk"),
        (10, lambda: [Extent(-1, 1, zero=True)], "", "leaves the disk"),
        (10, None, "its bitmap was lost", "its bitmap was lost"),
    ],
)
def test_any_doubt_reads_the_whole_disk(
    host: Host, size: int, changed: Callable[[], list[Extent]] | None, because: str, doubt: str
) -> None:
    _, made = host.take(Disk(10 * CHUNK_BYTES, {1: chunk(1)}))
    disk = Disk(size * CHUNK_BYTES, {1: chunk(1), 2: chunk(2)})
    taken, second = host.take(disk, made, changed, whole_because=because)
    assert taken.whole
    assert doubt in host.doubts[0]
    assert [host.chunk(second, number) for number in (1, 2, 3)] == [chunk(1), chunk(2), bytes(CHUNK_BYTES)]


def test_a_base_whose_pages_are_damaged_is_a_doubt_and_no_more(host: Host) -> None:
    disk = Disk(4 * CHUNK_BYTES, {1: chunk(1)})
    _, made = host.take(disk)
    for name, file in host.folder.files.items():
        if name.startswith("packs/"):
            file.content = file.content[:8] + bytes([255 - byte for byte in file.content[8:40]]) + file.content[40:]
    page = bytes.fromhex(made.shown.disks[0].pages[0])
    lost = manifests.DiskMap(size_bytes=disk.size, pages=(bytes(reversed(page)).hex(),))
    made = made.model_copy(update={"shown": made.shown.model_copy(update={"disks": (lost,)})})
    taken, _ = host.take(disk, made, list)
    assert taken.whole
    assert "is in no pack" in host.doubts[0]


def test_what_an_interrupted_run_has_named_is_read_again_where_the_repository_has_it_not(host: Host) -> None:
    disk = Disk(4 * CHUNK_BYTES, {0: chunk(1), 1: chunk(2)})
    _, first = host.take(disk)
    there = host.repository.chunk_names(first.shown.disks[0])[:NAME_BYTES]
    taken, made = host.take(disk, stored={0: there, 1: b"x" * NAME_BYTES})
    assert taken.resumed_bytes == CHUNK_BYTES
    assert [host.chunk(made, number) for number in (0, 1)] == [chunk(1), chunk(2)]


def test_a_disk_is_compared_with_the_one_of_its_own_name(host: Host) -> None:
    disk = Disk(4 * CHUNK_BYTES, {2: chunk(2)})
    (_, other), (_, mine) = host.take(Disk(4 * CHUNK_BYTES, {2: chunk(1)})), host.take(disk)
    named = (other.sealed.disks[0].model_copy(update={"target": "vdb"}), mine.sealed.disks[0])
    both = Manifest(
        shown=mine.shown.model_copy(update={"disks": (other.shown.disks[0], mine.shown.disks[0])}),
        sealed=mine.sealed.model_copy(update={"disks": named}),
    )
    taken, made = host.take(disk, both, list)
    assert (taken.whole, host.doubts) == (False, [])
    assert host.chunk(made, 2) == chunk(2)


def test_what_the_repository_has_lost_is_stored_again(host: Host) -> None:
    """A pack that somebody removed, and one whose footer is damaged: the next run heals what it still can read."""
    disk = Disk(4 * CHUNK_BYTES, {1: chunk(1), 2: chunk(2)})
    _, made = host.take(disk)
    (pack,) = [name for name in host.folder.files if name.startswith("packs/")]
    page = host.repository.read_page(bytes.fromhex(made.shown.disks[0].pages[0]))
    whole = host.folder.files.pop(pack)
    session = Session(host.repository)
    session.add_page(page)  # what the manifest names is there, what that names is not
    session.commit(manifest_of(made.shown.disks[0]))
    taken, second = host.take(disk, made, list)
    assert taken.whole
    assert "are missing from the repository" in host.doubts[0]
    assert host.chunk(second, 2) == chunk(2)

    whole.content = whole.content[:-1]
    host.folder.files[pack] = whole
    taken, _ = host.take(disk, second, list)
    assert taken.whole
    assert "cannot be read" in host.doubts[0]


def test_nobody_warns_where_nothing_was_expected(host: Host) -> None:
    disk = Disk(4 * CHUNK_BYTES, {1: chunk(1)})
    _, made = host.take(disk)
    assert host.take(disk, made)[0].whole
    assert host.doubts == []


def test_a_cancel_and_a_broken_disk_are_what_they_are(host: Host) -> None:
    disk = Disk(4 * CHUNK_BYTES, {1: chunk(1)})
    _, made = host.take(disk)
    with pytest.raises(Cancelled):
        host.take(disk, made, list, stop=lambda: True)

    class Broken(Disk):
        def read_into(self, offset: int, buffer: memoryview) -> None:
            raise DiskReadFailed("the device is gone")

    with pytest.raises(SourceReadFailed, match="vda: the device is gone"):
        host.take(Broken(disk.size, disk.chunks), made, list)


@pytest.mark.parametrize("is_written", [True, False])
def test_a_backing_file_that_is_written_to_while_the_guest_is_off_gives_no_point(
    host: Host, tmp_path: Path, is_written: bool
) -> None:
    """Another guest may have the same one. The guest's own file is not changed by that."""
    base = tmp_path / "base.raw"
    base.write_bytes(chunk(1) + chunk(2))
    run(["qemu-img", "create", "-q", "-f", "qcow2", "-b", base.name, "-F", "raw", str(tmp_path / "top")], timeout_s=60)
    spec = ImageSpec(format="qcow2", over=RawSpec(path=str(tmp_path / "top")), root=str(tmp_path), name="top")

    def moved(_: Copied) -> None:
        if is_written:
            last = base.stat().st_mtime_ns
            os.utime(base, ns=(last, last + 1))

    def taken() -> Taken:
        return take(
            ToTake(TARGET, partial(open_reader, spec)),
            None,
            host.repository,
            Session(host.repository),
            stop=lambda: False,
            on_progress=moved,
            doubt=lambda _: None,
        )

    if not is_written:
        assert taken().disk.size_bytes == 2 * CHUNK_BYTES
        return
    with pytest.raises(SourceRunning, match=f"disk {TARGET}: base.raw was changed while it was read: it was written to"):
        taken()


@pytest.mark.parametrize("named", ["../base.raw", "{}/base.raw"])
def test_a_backing_file_in_another_folder_is_named_with_what_to_do(host: Host, tmp_path: Path, named: str) -> None:
    named = named.format(tmp_path)
    (tmp_path / "base.raw").write_bytes(chunk(1))
    (tmp_path / "own").mkdir()
    top = tmp_path / "own" / "top"
    run(["qemu-img", "create", "-q", "-f", "qcow2", "-b", named, "-F", "raw", str(top)], timeout_s=60)
    spec = ImageSpec(format="qcow2", over=RawSpec(path=str(top)), root=str(top.parent), name="top")

    def refused() -> None:
        take(
            ToTake(TARGET, partial(open_reader, spec)),
            None,
            host.repository,
            Session(host.repository),
            stop=lambda: False,
            on_progress=lambda _: None,
            doubt=lambda _: None,
        )

    with pytest.raises(
        SourceReadFailed, match=f"disk {TARGET}: its image needs .*base.raw.* the folder of the image"
    ) as caught:
        refused()
    assert "import root" not in caught.value.detail
    assert "while it runs" in str(caught.value.hint)


# ── names and pages ──────────────────────────────────────────────────────────────────────────────────────────────────


@cases(20)
@given(
    st.dictionaries(st.integers(0, PAGE_CHUNKS + 5), st.integers(1, 3), max_size=6),
    st.dictionaries(st.integers(0, PAGE_CHUNKS + 5), st.integers(0, 3), max_size=6),
)
def test_an_increment_has_the_pages_that_a_whole_copy_has(before: dict[int, int], changes: dict[int, int]) -> None:
    """Over the ends of pages; 0: the chunk becomes zeros. A chunk here is its first byte."""
    size = (PAGE_CHUNKS + 5) * CHUNK_BYTES + 100
    repository = opened(MemoryFolder(), new=True)
    old = written(repository, size, before, None, None)
    after = {number: byte for number, byte in (before | changes).items() if byte}
    listed = Chunks(size)
    for number in changes:
        listed.add(number * CHUNK_BYTES, 1)
    assert [number in listed for number in changes] == [True] * len(changes)
    assert written(repository, size, after, Before(repository, old), listed) == written(repository, size, after, None, None)


def written(
    repository: Repository, size: int, content: dict[int, int], before: Before | None, changed: Chunks | None
) -> manifests.DiskMap:
    session = Session(repository)
    writer = ChunkWriter(session, size, before=before, changed=changed)
    for start, length in [(0, size)] if changed is None else changed.areas():
        at = start
        for number in sorted(
            number for number, byte in content.items() if byte and start <= number * CHUNK_BYTES < start + length
        ):
            writer.zero(at, number * CHUNK_BYTES - at)
            at = min((number + 1) * CHUNK_BYTES, size)
            writer.write(number * CHUNK_BYTES, memoryview(bytes([content[number]]) + bytes(at - number * CHUNK_BYTES - 1)))
        writer.zero(at, start + length - at)
    found = writer.finish()
    session.commit(manifest_of(found))
    return found


def manifest_of(disk: manifests.DiskMap, point_id: UUID | None = None) -> Manifest:
    named = manifests.Named(target=TARGET, path="/x", size_bytes=disk.size_bytes)
    sealed = manifests.Sealed(
        vm_id="v", vm_name="v", consistency="crash", job_id=uuid4(), run_id=uuid4(), domain_xml="<domain/>", disks=(named,)
    )
    return Manifest(shown=manifests.Shown(id=point_id or uuid4(), created_at=now(), disks=(disk,)), sealed=sealed)


def test_a_chunk_that_never_comes_or_comes_twice_or_was_not_to_come_is_refused() -> None:
    repository, size = opened(MemoryFolder(), new=True), 5 * CHUNK_BYTES
    old = written(repository, size, {1: 1}, None, None)
    changed = Chunks(size)
    changed.add(CHUNK_BYTES, 1)
    changed.add(3 * CHUNK_BYTES, 1)
    writer = ChunkWriter(Session(repository), size, before=Before(repository, old), changed=changed)
    writer.zero(CHUNK_BYTES, CHUNK_BYTES)
    with pytest.raises(DiskWriteFailed, match="twice"):
        writer.zero(CHUNK_BYTES, CHUNK_BYTES)
    with pytest.raises(DiskWriteFailed, match="twice"):
        writer.zero(0, CHUNK_BYTES)
    with pytest.raises(DiskWriteFailed, match=f"offset {3 * CHUNK_BYTES}"):
        writer.finish()


@cases(50)
@given(st.lists(st.tuples(st.integers(0, 3000 * CHUNK_BYTES - 1), st.integers(1, 40 * CHUNK_BYTES)), max_size=8))
def test_areas_are_the_chunks_that_were_touched(touched: list[tuple[int, int]]) -> None:
    size = 3000 * CHUNK_BYTES
    chunks = Chunks(size)
    wanted = set()
    for start, length in touched:
        end = min(start + length, size)
        chunks.add(start, end - start)
        wanted |= set(range(start // CHUNK_BYTES, -(-end // CHUNK_BYTES)))
    found: list[int] = []
    for start, length in chunks.areas():
        assert start % CHUNK_BYTES == 0
        found += range(start // CHUNK_BYTES, (start + length) // CHUNK_BYTES)
    assert found == sorted(wanted)
    with pytest.raises(SynvirtError):
        chunks.add(size, 1)
