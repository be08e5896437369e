"""Hosts that share a repository and see one another late: a point is whole, or its run was refused; no other is harmed."""

from collections.abc import Iterator
from contextlib import suppress

import pytest

from synvirt.errors import BackupConflict, SynvirtError
from synvirt.repository.garbage import GRACE_S, YOUNG_S, collect
from synvirt.repository.repository import Repository
from synvirt.repository.verify import verify_repository
from tests.backups.folders import MemoryFolder, Stale
from tests.backups.points import KEY, back_up, opened, restored
from tests.fakes.disks import MemoryReader

LATE = YOUNG_S + 1


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


def test_two_runs_that_do_not_see_each_other_store_what_both_need_twice_and_are_both_whole() -> None:
    folder = MemoryFolder()
    opened(folder, new=True)
    late = Stale(folder, fresh_at=1000)
    for seen in (folder, late):
        back_up(Repository(seen, KEY), _small("AAB"), threads=0)
    assert _is_well(folder) == 2
