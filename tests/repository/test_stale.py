"""Hosts that share a repository and see one another late: a point is whole, or its run was refused; no other is harmed."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

from synvirt.errors import BackupConflict, SynvirtError
from synvirt.repository import condemned, footers, packs, verify
from synvirt.repository.disk import PointReader
from synvirt.repository.folder import Entry
from synvirt.repository.garbage import GRACE_S, YOUNG_S, collect
from synvirt.repository.keys import CHUNK_BYTES
from synvirt.repository.repository import Repository
from synvirt.repository.session import Session
from synvirt.repository.verify import PointLooked, verify_point, verify_repository
from tests.fakes.disks import MemoryReader
from tests.repository.folders import MemoryFolder, Stale
from tests.repository.points import KEY, back_up, disk, opened, restored

LATE = YOUNG_S + 1


def _of(content: bytes) -> MemoryReader:
    found = disk("A" * (4 * len(content) // CHUNK_BYTES))
    found.content = content
    return found


def _small(blocks: str) -> MemoryReader:
    return MemoryReader(blocks, block_bytes=1500)


KNOWN = {_small(blocks).content for blocks in ("AAB", "CCD", "AABE")}


def _starts() -> Iterator[MemoryFolder]:
    """A point that stays and one that was removed: before what only that needs is condemned, after, and when it is to go."""
    folder = MemoryFolder()
    repository = opened(folder, new=True)
    back_up(repository, _small("CCD"), threads=0)
    repository.remove(back_up(repository, _small("AAB"), threads=0))
    folder.now += LATE
    yield folder.copied()
    collect(Repository(folder, KEY), now=folder.now)
    yield folder.copied()
    folder.now += GRACE_S + 1
    yield folder.copied()


def _is_well(folder: MemoryFolder) -> int:
    """Now, and after the next collections; how many points there are."""
    for late in (0.0, 60.0, GRACE_S + 1, 2 * GRACE_S + 2):
        repository = Repository(folder, KEY)
        points = repository.point_ids()
        for point in points:
            assert restored(repository, point, threads=0)[0] in KNOWN
        assert verify_repository(repository, threads=1).wrongs == ()
        folder.now += late
        collect(repository, now=folder.now)
    return len(points)


@pytest.mark.parametrize("number", range(3))
def test_a_run_that_does_not_see_what_is_condemned_or_removed_beside_it(number: int) -> None:
    start = list(_starts())[number]
    ends = set()
    for fresh_at in range(40):
        folder = start.copied()
        late = Stale(folder, fresh_at=fresh_at)
        collect(Repository(folder, KEY), now=folder.now)
        with suppress(BackupConflict):
            back_up(Repository(late, KEY), _small("AABE"), threads=0)
        ends.add(_is_well(folder))
    assert 2 in ends, "some runs end with a point"


class OldPacks(Stale):
    """It still shows the packs of before where it shows of all else what is there: an NFS client keeps each folder's list for
    itself."""

    def entries(self, folder: str) -> list[Entry]:
        return super().entries(folder) if folder == packs.FOLDER else self.inner.entries(folder)

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        return self.inner.read(name, offset, length)


def test_a_run_that_still_sees_packs_which_are_gone_is_refused() -> None:
    """It took longer than the grace of what it relies on, and stores nothing, which would make its host look again."""
    folder = next(_starts())
    session = Session(Repository(OldPacks(folder, fresh_at=1_000), KEY))
    for late in (0, GRACE_S + 1):
        collected = collect(Repository(folder, KEY), now=folder.now + late)
    assert collected.packs_deleted == 1
    with pytest.raises(BackupConflict):
        back_up(session._repository, _small("AAB"), session=session, threads=0)
    assert _is_well(folder) == 1
    assert condemned.packs_of(folder) == frozenset()


@pytest.mark.parametrize("number", range(3))
def test_a_collection_that_does_not_see_the_run_that_ended_beside_it(number: int) -> None:
    start = list(_starts())[number]
    for fresh_at in range(40):
        folder = start.copied()
        late = Stale(folder, fresh_at=fresh_at)
        back_up(Repository(folder, KEY), _small("AABE"), threads=0)
        with suppress(SynvirtError):
            collect(Repository(late, KEY), now=folder.now)
        assert _is_well(folder) == 2


@pytest.mark.parametrize("reads", ["restore", "verification"])
@pytest.mark.parametrize("is_cached", [False, True])
def test_one_that_reads_for_longer_than_a_collection_takes_finds_what_that_moved(
    reads: str, is_cached: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pack that it knew is gone by then, and so may be the copy of its footer that hosts' processes share."""
    monkeypatch.setattr(footers, "HELD_BYTES", 0)
    cache = tmp_path / "footers" if is_cached else None
    folder, noise = MemoryFolder(), Random(7).randbytes(9 * CHUNK_BYTES)
    first = opened(folder, new=True)
    gone = back_up(first, _of(noise))
    (half_used,) = first.pack_sizes()
    stays, other = back_up(first, _of(noise[: 3 * CHUNK_BYTES])), back_up(first, disk("BBBB"))
    first.remove(gone)
    repository = Repository(folder, KEY, cache=cache)
    (taken,) = repository.manifest(stays).shown.disks

    def collected() -> None:
        for late in (LATE, GRACE_S + 1):
            folder.now += late
            collect(Repository(folder, KEY, cache=cache), now=folder.now)
        assert f"packs/{half_used}" not in folder.files

    if reads == "restore":
        reader, found = PointReader(repository, taken), bytearray(taken.size_bytes)
        for at in range(0, taken.size_bytes, CHUNK_BYTES):
            reader.read_into(at, memoryview(found)[at : at + CHUNK_BYTES])
            if at == 0:
                restored(repository, other)  # whose footer is the one that is held from then on
                collected()
        assert bytes(found) == noise[: taken.size_bytes]
    else:
        monkeypatch.setattr(verify, "default_threads", lambda: 1)
        looked: list[PointLooked] = []

        def then_it_is_collected(so_far: PointLooked) -> None:
            looked.append(so_far)
            if len(looked) == 1:
                collected()

        whole = verify_point(repository, stays, on_looked=then_it_is_collected)
        assert (whole.wrong, whole.chunks, whole.broken) == (None, 3, {})


def test_a_damaged_pack_is_looked_for_once_however_many_chunks_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """To list all packs for each chunk would take days where many are damaged."""
    folder = MemoryFolder()
    point = back_up(opened(folder, new=True), _of(Random(7).randbytes(9 * CHUNK_BYTES)))
    (pack,) = (name for name in folder.files if name.startswith("packs/"))
    repository, content = Repository(folder, KEY), bytearray(folder.files[pack].content)
    for entry in repository.index.entries(pack.removeprefix("packs/")):
        if entry.kind == packs.CHUNK:
            content[entry.offset] ^= 1
    folder.files[pack].content = bytes(content)
    refreshed: list[Repository] = []
    refresh = Repository.refresh

    def counted(self: Repository) -> None:
        refreshed.append(self)
        refresh(self)

    monkeypatch.setattr(Repository, "refresh", counted)
    monkeypatch.setattr(verify, "default_threads", lambda: 1)
    found = verify_point(repository, point)
    assert (found.chunks, [*found.broken]) == (9, [pack.removeprefix("packs/")])
    assert len(refreshed) == 2, "at its beginning, and when the first chunk could not be read"


def test_two_runs_that_do_not_see_each_other_store_what_both_need_twice_and_are_both_whole() -> None:
    folder = MemoryFolder()
    opened(folder, new=True)
    late = Stale(folder, fresh_at=1000)
    for seen in (folder, late):
        back_up(Repository(seen, KEY), _small("AAB"), threads=0)
    assert _is_well(folder) == 2
