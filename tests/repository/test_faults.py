"""A run dies at each call it makes to the storage: earlier points stay as they were, and the run can be made again."""

from collections.abc import Callable
from random import Random
from uuid import UUID

import pytest

from synvirt.errors import RepositoryFull, SynvirtError
from synvirt.repository import packs
from synvirt.repository.disk import PointReader
from synvirt.repository.folder import UNFINISHED
from synvirt.repository.keys import CHUNK_BYTES
from synvirt.repository.repository import Repository
from synvirt.repository.verify import verify_point, verify_repository
from tests.cases import TIMES
from tests.fakes.disks import MemoryReader
from tests.repository.folders import Counted, Cut, Died, MemoryFolder, io_error
from tests.repository.points import KEY, back_up, disk, opened, restored

# Disks of a few KiB, each a chunk of its own: so that a run has many calls and little to do.
EARLIER = ("AB-C", "DE-", "G")
LATER = ("AB-C", "DEF", "H", "IJ", "K", "L-", "M", "-N", "O", "P", "Q", "R")


def small(blocks: str) -> MemoryReader:
    return MemoryReader(blocks, block_bytes=1500)


def contents(all_blocks: tuple[str, ...]) -> list[bytes]:
    return [small(blocks).content for blocks in all_blocks]


@pytest.fixture(autouse=True)
def small_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pack a chunk, so that a run has many calls."""
    monkeypatch.setattr(packs, "PACK_BYTES", 1)


def _run(folder: Counted) -> None:
    back_up(Repository(folder, KEY), *map(small, LATER), threads=0)


def _calls(start: MemoryFolder) -> int:
    counted = Counted(start.copied())
    _run(counted)
    return counted.calls


def _is_whole(after: MemoryFolder, earlier: list[object]) -> None:
    repository = Repository(after, KEY)
    assert set(earlier) <= set(repository.point_ids())
    for point in repository.point_ids():
        assert restored(repository, point, threads=0) == contents(EARLIER if point in earlier else LATER)
        assert verify_point(repository, point).wrong is None
    again = back_up(repository, *map(small, LATER), threads=0)
    assert restored(Repository(after, KEY), again, threads=0) == contents(LATER)
    assert verify_repository(repository, threads=1).wrongs == ()


@pytest.mark.parametrize("how", ["lost", "kept", "torn"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_the_power_fails_at_each_call(how: Cut, after: bool) -> None:
    start = MemoryFolder()
    earlier: list[object] = [back_up(opened(start, new=True), *map(small, EARLIER), threads=0)]
    calls = _calls(start)
    assert calls >= 70
    for number in range(calls):
        inner = start.copied()
        with pytest.raises(Died):
            _run(Counted(inner, stop_at=number, error=Died, after=after))
        _is_whole(inner.cut(how, Random(number)), earlier)


@pytest.mark.parametrize("error", [io_error, RepositoryFull], ids=["EIO", "ENOSPC"])
@pytest.mark.parametrize("again", [False, True], ids=["once", "for good"])
def test_each_call_fails(error: Callable[[], SynvirtError], again: bool) -> None:
    start = MemoryFolder()
    earlier: list[object] = [back_up(opened(start, new=True), *map(small, EARLIER), threads=0)]
    for number in range(_calls(start)):
        inner = start.copied()
        with pytest.raises(SynvirtError):
            _run(Counted(inner, stop_at=number, error=error, again=again))
        _is_whole(inner, earlier)
        if not again:  # what has no name takes no space, which a full disk does not have
            assert inner.entries(UNFINISHED) == []


def _damaged(folder: MemoryFolder, random: Random) -> str:
    """One file flipped, cut off, removed, or put in another's place; what was done."""
    names = sorted(folder.files)
    name = random.choice(names)
    content = folder.files[name].content
    match random.choice(["flip", "cut", "delete", "swap", "zero"]):
        case "flip":
            at = random.randrange(len(content))
            folder.files[name].content = content[:at] + bytes([content[at] ^ (1 << random.randrange(8))]) + content[at + 1 :]
            return f"bit of {name} at {at} flipped"
        case "cut":
            folder.files[name].content = content[: random.randrange(len(content))]
            return f"{name} cut off"
        case "delete":
            folder.delete(name)
            return f"{name} deleted"
        case "swap":
            other = random.choice([one for one in names if folder.files[one].content != content])
            folder.files[name], folder.files[other] = folder.files[other], folder.files[name]
            return f"{name} and {other} swapped"
        case _:
            at = random.randrange(len(content))
            folder.files[name].content = content[:at] + bytes(min(512, len(content) - at)) + content[at + 512 :]
            return f"512 bytes of {name} at {at} zeroed" if folder.files[name].content != content else ""


class Damaged:
    """A small store of two points, to be damaged in one place at a time."""

    def __init__(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(packs, "PACK_BYTES", 4000)
            self._start = MemoryFolder()
            repository = opened(self._start, new=True)
            self._known = {back_up(repository, *map(small, blocks), threads=0): contents(blocks) for blocks in (EARLIER, LATER)}
            assert len(repository.pack_sizes()) >= 4

    def reported_by(self, seed: int) -> str:
        """What reports this damage first. AssertionError, where a restore has other bytes than were backed up."""
        folder, random, what = self._start.copied(), Random(seed), ""
        while not what:
            what = _damaged(folder, random)
        try:
            found = Repository(folder, KEY)
        except SynvirtError:
            return "at opening"
        by = "by verify" if verify_repository(found, threads=1).wrongs else "nobody"
        for point, content in self._known.items():
            try:
                assert self._read(found, point) == content, f"{what} (seed {seed})"
            except SynvirtError:
                by = "by restore" if by == "nobody" else by
        found.close()
        return by

    @staticmethod
    def _read(repository: Repository, point: UUID) -> list[bytes]:
        """As a restore does, without the threads and the target."""
        found = []
        for one in repository.manifest(point).shown.disks:
            content = bytearray(one.size_bytes)
            PointReader(repository, one).read_into(0, memoryview(content))
            found.append(bytes(content))
        return found


# In parts that several workers share. All ten thousand: CASES_TIMES=5, or python -m bench.damage.
PARTS, DAMAGES = 2, 1000 * TIMES


@pytest.mark.timeout(120 * TIMES + 60)
@pytest.mark.parametrize("part", range(PARTS))
def test_no_damage_passes_in_silence(part: int) -> None:
    """Verify reports it, or the restore of a point that is known; and what is restored in spite of it is what was backed up."""
    damaged = Damaged()
    for seed in range(part * DAMAGES, (part + 1) * DAMAGES):
        assert damaged.reported_by(seed) != "nobody", f"seed {seed}"


def _chunks(folder: MemoryFolder, repository: Repository) -> list[tuple[packs.Entry, bytes]]:
    """Of all packs, with their frames."""
    return [
        (entry, packs.read_frame(folder, pack, entry))
        for pack in sorted(repository.pack_sizes())
        for entry in repository.index.entries(pack)
        if entry.kind == packs.CHUNK
    ]


def test_frames_that_change_places_are_noticed() -> None:
    """By somebody who makes the hashes fit again, without the key."""
    start = MemoryFolder()
    repository = opened(start, new=True)
    point = back_up(repository, disk("AAAABBBB"), threads=0)
    (one, first), (two, second) = _chunks(start, repository)
    for entry, frame in ((one, second), (two, first)):
        anew = packs.Pack()
        anew.add(entry.name, packs.CHUNK, frame, CHUNK_BYTES)
        name, content, _ = anew.closed()
        start.write(f"packs/{name}", [content])
        place = repository.place(entry.name)
        assert place is not None
        start.delete(f"packs/{place.pack}")
    repository = Repository(start, KEY)
    assert verify_repository(repository).wrongs == ()
    with pytest.raises(SynvirtError, match="cannot be opened"):
        restored(repository, point, threads=0)
    assert verify_point(repository, point).wrong is not None


def test_a_damaged_chunk_says_where_on_the_disk_it_is() -> None:
    start = MemoryFolder()
    repository = opened(start, new=True)
    point = back_up(repository, disk("AAAABBBBCCCC"), threads=0)
    (first, _), *_ = _chunks(start, repository)
    place = repository.place(first.name)
    assert place is not None
    file = start.files[f"packs/{place.pack}"]
    damaged = bytearray(file.content)
    damaged[first.offset] ^= 0xFF  # another byte for certain: a fixed one already exists, one time in 256
    file.content = bytes(damaged)
    with pytest.raises(SynvirtError, match=r"changed at bytes \d+ to \d+: the disk cannot be read at offset \d+$"):
        restored(repository, point, threads=0)
