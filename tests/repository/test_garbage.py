"""What nothing needs is removed, in two steps; what anything needs never is."""

from collections.abc import Callable, Iterable
from random import Random
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synvirt.copying import Bucket, Copied, copy
from synvirt.errors import BackupConflict, Cancelled, RepositoryDamaged
from synvirt.repository import condemned, garbage, packs
from synvirt.repository.disk import ChunkWriter
from synvirt.repository.folder import Entry, Folder
from synvirt.repository.garbage import GRACE_S, YOUNG_S, Sweep, collect, condemn
from synvirt.repository.keys import CHUNK_BYTES
from synvirt.repository.repository import Repository
from synvirt.repository.session import Session
from synvirt.repository.verify import verify_repository
from synvirt.sizes import MIB
from tests.cases import cases
from tests.fakes.disks import MemoryReader
from tests.repository.folders import Counted, Died, MemoryFolder
from tests.repository.points import KEY, back_up, disk, opened, restored

LATE = YOUNG_S + 1


def _size(folder: MemoryFolder) -> int:
    return sum(len(file.content) for name, file in folder.files.items() if name.startswith("packs/"))


def a_quarter_needed(folder: MemoryFolder) -> tuple[Repository, MemoryReader, UUID]:
    """A repository with one pack of a removed point, of which another point needs a quarter: that point's disk, and its id."""
    repository = opened(folder, new=True)
    noise, part = disk("AAAABBBBCCCCDDDD"), disk("AAAA")
    noise.content = Random(3).randbytes(len(noise.content))
    part.content = noise.content[: len(part.content)]
    gone, stays = back_up(repository, noise), back_up(repository, part)
    repository.remove(gone)
    return repository, part, stays


def test_the_bytes_of_a_removed_point_go_after_a_day() -> None:
    folder = MemoryFolder()
    repository = opened(folder, new=True)
    for point in (back_up(repository, disk("AAAABBBB")), back_up(repository, disk("AAAACCCC"))):
        repository.remove(point)
    assert collect(repository, now=folder.now).packs_condemned == 0, "they are young: a run may be about to need them"
    folder.now += LATE
    alone = back_up(repository, disk("DDDD"))
    first = collect(repository, now=folder.now)
    assert (first.packs_deleted, first.packs_condemned) == (0, 2)
    assert collect(repository, now=folder.now + GRACE_S - 1).packs_deleted == 0
    before = _size(folder)
    second = collect(repository, now=folder.now + GRACE_S)
    assert second.packs_deleted == 2
    assert before - _size(folder) == second.bytes_deleted > 0
    assert restored(repository, alone) == [disk("DDDD").content]
    assert verify_repository(repository).wrongs == ()


def test_a_file_that_is_being_written_is_left_to_its_writer_and_a_crashs_leftover_goes() -> None:
    folder = MemoryFolder()
    repository = opened(folder, new=True)
    folder.write("tmp/0123456789abcdef", [b"the pack of another host's run"])
    for age, left in ((0, True), (YOUNG_S - 1, True), (YOUNG_S, False)):
        collect(repository, now=folder.now + age)
        assert ("tmp/0123456789abcdef" in folder.files) is left


def test_a_pack_of_which_little_is_needed_is_packed_again() -> None:
    folder = MemoryFolder()
    repository, part, stays = a_quarter_needed(folder)
    folder.now += LATE
    assert collect(repository, now=folder.now, dry_run=True).bytes_moved > 0
    assert len(repository.pack_sizes()) == 2
    assert collect(repository, now=folder.now).bytes_moved > 0
    assert restored(Repository(folder, KEY), stays) == [part.content]
    assert collect(repository, now=folder.now + GRACE_S).packs_deleted == 1
    assert restored(Repository(folder, KEY), stays) == [part.content]
    assert _size(folder) < 3 << 20


@pytest.mark.parametrize("moment", ["pack_sizes", "point_ids"])
def test_a_run_that_ends_during_the_look_is_left_alone(monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    """Runs of one service have one repository between them: what this one adds is found in the middle of the look."""
    folder = MemoryFolder()
    repository = opened(folder, new=True)
    repository.remove(back_up(repository, disk("AAAA")))
    folder.now += LATE
    points: list[UUID] = []
    looked = getattr(repository, moment)

    def then_it_ended() -> object:
        found = looked()
        if not points:
            points.append(back_up(repository, disk("BBBB")))
        return looked() if moment == "point_ids" else found

    monkeypatch.setattr(repository, moment, then_it_ended)
    found = collect(repository, now=folder.now)
    assert (found.packs_condemned, found.packs_deleted) == (1, 0)
    assert restored(Repository(folder, KEY), points[0]) == [disk("BBBB").content]


def test_a_condemned_pack_that_is_needed_again_stays() -> None:
    """The point came between the condemning and the deleting: by a run that had looked before."""
    folder = MemoryFolder()
    repository = opened(folder, new=True)
    repository.remove(back_up(repository, disk("AAAA")))
    folder.now += LATE
    manifest_free = Session(repository)
    collect(repository, now=folder.now)
    folder.files = {name: file for name, file in folder.files.items() if not name.startswith("condemned/")}
    point = back_up(repository, disk("AAAA"), session=manifest_free)
    collect(repository, now=folder.now)
    collect(repository, now=folder.now + GRACE_S)
    assert restored(Repository(folder, KEY), point) == [disk("AAAA").content]


def test_a_damaged_pack_that_is_needed_stays_and_is_not_relied_on() -> None:
    folder = MemoryFolder()
    repository = opened(folder, new=True)
    point = back_up(repository, disk("AAAA"))
    (pack,) = repository.pack_sizes()
    condemn(folder, [pack])
    for _ in range(3):
        folder.now += LATE
        collect(repository, now=folder.now)
        assert [*repository.pack_sizes()] == [pack]
    later = back_up(repository, disk("AAAA"))
    assert len(repository.pack_sizes()) == 2, "it was written again"
    folder.now += LATE
    collect(repository, now=folder.now)
    collect(repository, now=folder.now + GRACE_S)
    assert pack not in repository.pack_sizes()
    assert [restored(repository, one) for one in (point, later)] == [[disk("AAAA").content]] * 2
    assert folder.entries("condemned") == []


def test_a_run_that_relied_on_what_is_condemned_is_refused_and_the_next_writes_it_again() -> None:
    folder = MemoryFolder()
    repository = opened(folder, new=True)
    repository.remove(back_up(repository, disk("AAAA")))
    folder.now += LATE
    session = Session(repository)
    writer = ChunkWriter(session, disk("AAAA").size)
    copy(disk("AAAA"), writer, fresh=False)
    collect(Repository(folder, KEY), now=folder.now)
    with pytest.raises(BackupConflict, match="garbage"):
        back_up(repository, disk("AAAA"), session=session)
    again = Session(repository)
    point = back_up(repository, disk("AAAA"), session=again)
    assert again.new_bytes > 0
    collect(repository, now=folder.now + GRACE_S)
    assert restored(Repository(folder, KEY), point) == [disk("AAAA").content]


class Between(Counted):
    """`then` happens once, right after the next list of the packs has been read."""

    def __init__(self, inner: Folder) -> None:
        super().__init__(inner)
        self.then: Callable[[], object] | None = None

    def entries(self, folder: str) -> list[Entry]:
        found, then = super().entries(folder), self.then
        if then is not None and folder == packs.FOLDER:
            self.then = None
            then()
        return found


def test_a_run_that_ends_while_what_it_relied_on_is_deleted_is_refused() -> None:
    """The packs go first, then the list that condemned them: who read the list last found neither."""
    folder = MemoryFolder()
    repository = opened(folder, new=True)
    repository.remove(back_up(repository, disk("AAAA")))
    folder.now += LATE
    between = Between(folder)
    session = Session(Repository(between, KEY))
    copy(disk("AAAA"), ChunkWriter(session, disk("AAAA").size), fresh=False)
    collect(repository, now=folder.now)
    between.then = lambda: collect(repository, now=folder.now + GRACE_S)
    with pytest.raises(BackupConflict, match="garbage"):
        back_up(repository, disk("AAAA"), session=session)
    assert repository.point_ids() == []


def test_a_run_of_another_process_that_ends_during_the_look_is_no_damage() -> None:
    """Its point was listed, and its packs were not: the collection failed, and asked for a verification."""
    folder = MemoryFolder()
    repository = opened(folder, new=True)
    repository.remove(back_up(repository, disk("AAAA")))
    folder.now += LATE
    between = Between(folder)
    collecting, points = Repository(between, KEY), list[UUID]()
    between.then = lambda: points.append(back_up(repository, disk("BBBB")))
    assert collect(collecting, now=folder.now).packs_condemned == 1
    assert restored(Repository(folder, KEY), points[0]) == [disk("BBBB").content]


def test_two_hosts_that_collect_at_once_keep_the_same_one_of_two_copies() -> None:
    """Both had written the chunks at once. Each host's index has its own packs in another place than the other host's."""
    folder = MemoryFolder()
    here, there = opened(folder, new=True), Repository(folder, KEY)
    sessions = [Session(one) for one in (here, there)]
    points = [back_up(one, disk("AAAABBBB"), session=session) for one, session in zip((here, there), sessions, strict=True)]
    assert len(Repository(folder, KEY).pack_sizes()) == 2
    folder.now += LATE

    def meanwhile(_: Sweep) -> None:
        collect(there, now=folder.now)

    for _ in range(2):  # the first night both condemn, the second both delete
        collect(here, now=folder.now, on_sweep=meanwhile)
        folder.now += GRACE_S
    for point in points:
        assert restored(Repository(folder, KEY), point) == [disk("AAAABBBB").content]
    assert len(Repository(folder, KEY).pack_sizes()) == 1


def test_one_that_goes_on_takes_nothing_that_a_backup_needs_by_then() -> None:
    """It had deleted one of two packs when it was cut off; a backup relies on the other one since."""
    folder = MemoryFolder()
    repository = opened(folder, new=True)
    first, made = back_up(repository, disk("AAAA")), set(repository.pack_sizes())
    second = back_up(repository, disk("BBBB"))
    (gone,) = set(repository.pack_sizes()) - made
    for point in (first, second):
        repository.remove(point)
    folder.now += LATE
    collect(repository, now=folder.now)
    folder.now += GRACE_S
    plans: list[Sweep] = []
    collect(Repository(folder.copied(), KEY), now=folder.now, on_sweep=plans.append)
    (plan,) = plans
    assert plan.deleted.keys() == {gone, *made}
    folder.delete(f"packs/{gone}")
    # The list of condemned packs is hidden from the backup: as if it had looked before that was written.
    lists = {name: file for name, file in folder.files.items() if name.startswith("condemned/")}
    for name in lists:
        folder.delete(name)
    point = back_up(Repository(folder, KEY), disk("AAAA"))
    folder.files |= lists
    done = collect(Repository(folder, KEY), now=folder.now, before=plan)
    assert (done.packs_deleted, done.bytes_deleted) == (1, plan.deleted[gone])
    assert restored(Repository(folder, KEY), point) == [disk("AAAA").content]


def test_what_was_moved_is_not_moved_again_by_one_that_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is condemned where it was as soon as it is durable where it goes."""
    monkeypatch.setattr(garbage, "MOVED_AT_ONCE", 1)
    folder = MemoryFolder()
    repository = opened(folder, new=True)
    noise = [Random(number).randbytes(3 * CHUNK_BYTES) for number in range(3)]
    points = [back_up(repository, _of(content)) for content in noise]
    sources = set(repository.pack_sizes())
    stays = back_up(repository, _of(b"".join(content[:CHUNK_BYTES] for content in noise)))
    for point in points:
        repository.remove(point)
    folder.now += LATE
    monkeypatch.setattr(packs, "PACK_BYTES", CHUNK_BYTES)
    written = iter(range(9))

    class Dying(Counted):
        def write(self, name: str, pieces: Iterable[bytes | bytearray | memoryview]) -> None:
            """Two new packs and two lists are written by then."""
            if next(written) == 4:
                raise Died
            super().write(name, pieces)

    with pytest.raises(Died):
        collect(Repository(Dying(folder), KEY), now=folder.now)
    moved = sources & condemned.packs_of(folder)
    assert len(moved) == 2
    read: list[str] = []
    read_frame = packs.read_frame

    def counted(folder: Folder, name: str, entry: packs.Entry) -> bytes:
        read.append(name)
        return read_frame(folder, name, entry)

    monkeypatch.setattr(packs, "read_frame", counted)
    collect(Repository(folder, KEY), now=folder.now)
    assert moved.isdisjoint(read)
    assert sources == sources & condemned.packs_of(folder)
    assert restored(Repository(folder, KEY), stays) == [b"".join(content[:CHUNK_BYTES] for content in noise)]


def _of(content: bytes) -> MemoryReader:
    found = disk("A" * (4 * len(content) // CHUNK_BYTES))
    found.content = content
    return found


def test_one_that_is_stopped_has_done_a_part_and_the_next_does_the_rest() -> None:
    folder = MemoryFolder()
    repository = opened(folder, new=True)
    for blocks in ("AAAA", "BBBB", "CCCC"):
        repository.remove(back_up(repository, disk(blocks)))
    folder.now += LATE
    collect(repository, now=folder.now)
    stops = iter((False, True))
    plans: list[Sweep] = []
    with pytest.raises(Cancelled):
        collect(repository, now=folder.now + GRACE_S, on_sweep=plans.append, stop=lambda: next(stops))
    assert len(Repository(folder, KEY).pack_sizes()) == 2
    done = collect(Repository(folder, KEY), now=folder.now + GRACE_S, before=plans[0])
    assert (done.packs_deleted, done) == (3, plans[0].collected())
    assert Repository(folder, KEY).pack_sizes() == {}


def test_whatever_call_it_is_cut_off_at_all_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By parts of a pack each. What was moved is counted with the pack that it was moved out of, condemned a moment later."""
    monkeypatch.setattr(garbage, "SWEPT_AT_ONCE", 1)
    monkeypatch.setattr(garbage, "MOVED_AT_ONCE", 1)
    start = MemoryFolder()
    repository = opened(start, new=True)
    for blocks in ("AAAA", "BBBB"):
        repository.remove(back_up(repository, disk(blocks)))
    start.now += LATE
    collect(repository, now=start.now)
    for number in range(2):
        noise = Random(number).randbytes(3 * CHUNK_BYTES)
        gone = back_up(repository, _of(noise))
        back_up(repository, _of(noise[:CHUNK_BYTES]))
        repository.remove(gone)
        repository.remove(back_up(repository, disk("CD"[number] * 4)))
    start.now += LATE
    counted = Counted(start.copied())
    done: list[Copied] = []
    whole = collect(Repository(counted, KEY), now=start.now, on_progress=done.append)
    assert (whole.packs_deleted, whole.packs_condemned) == (2, 4)
    assert (done[-1].watermark, done[-1].bytes_total) == (whole.bytes_deleted + whole.bytes_condemned,) * 2
    assert [one.watermark for one in done] == sorted(one.watermark for one in done)
    for number in range(counted.calls):
        folder = start.copied()
        parts: list[Sweep] = []
        with pytest.raises(Died):
            collect(Repository(Counted(folder, stop_at=number), KEY), now=start.now, on_sweep=parts.append)
        assert all(len(part.deleted) <= 1 >= len(part.condemned) for part in parts)
        found = collect(Repository(folder, KEY), now=start.now, before=parts[-1] if parts else None)
        assert found.model_copy(update={"bytes_moved": whole.bytes_moved}) == whole


def test_a_chunk_that_has_changed_or_is_nowhere_is_not_moved_but_reported() -> None:
    """In a new pack it would have a new hash, and would look as if it had been stored so."""
    for damage in ("changed", "nowhere"):
        folder = MemoryFolder()
        repository, _, _ = a_quarter_needed(folder)
        folder.now += LATE
        name = next(name for name in folder.files if name.startswith("packs/") and len(folder.files[name].content) > 2 * MIB)
        if damage == "changed":
            content = bytearray(folder.files[name].content)
            for entry in repository.index.entries(name.removeprefix("packs/")):
                content[entry.offset + 100] ^= 1
            folder.files[name].content = bytes(content)
        else:
            del folder.files[name]
        before = sorted(folder.files)
        with pytest.raises(RepositoryDamaged):
            collect(repository, now=folder.now)
        assert sorted(folder.files) == before


@pytest.mark.parametrize("damage", ["pack", "manifest", "page", "condemned"])
def test_nothing_is_removed_while_anything_cannot_be_read(damage: str) -> None:
    folder = MemoryFolder()
    repository = opened(folder, new=True)
    repository.remove(back_up(repository, disk("AAAA")))
    back_up(repository, disk("BBBB"))
    folder.now += LATE
    if damage == "condemned":
        collect(repository, now=folder.now)
    names = {"pack": "packs/", "manifest": "points/", "page": "packs/", "condemned": "condemned/"}
    for name in [name for name in folder.files if name.startswith(names[damage])]:
        content = folder.files[name].content
        folder.files[name].content = (
            content[:8] + bytes(len(content) - 120) + content[-112:] if damage == "page" else content[:-1]
        )
    before = sorted(folder.files)
    with pytest.raises(RepositoryDamaged):
        collect(Repository(folder, KEY), now=folder.now + GRACE_S + 1)
    assert sorted(folder.files) == before


def test_a_collection_that_dies_at_any_call_loses_nothing() -> None:
    start = MemoryFolder()
    repository, part, stays = a_quarter_needed(start)
    start.now += LATE
    for late in (0, GRACE_S):
        counted = Counted(start.copied())
        collect(Repository(counted, KEY), now=start.now + late)
        for number in range(counted.calls):
            folder = start.copied()
            with pytest.raises(Died):
                collect(Repository(Counted(folder, stop_at=number), KEY), now=start.now + late)
            after = folder.cut("torn", Random(number))
            assert restored(Repository(after, KEY), stays) == [part.content]
            collect(Repository(after, KEY), now=start.now + late)
            collect(Repository(after, KEY), now=start.now + late + 2 * GRACE_S)
            assert restored(Repository(after, KEY), stays) == [part.content]
        collect(repository, now=start.now)


@cases(40)
@given(
    st.lists(
        st.tuples(st.sampled_from(["back up", "remove", "collect"]), st.text("ABCDE-", min_size=1, max_size=9)), max_size=12
    )
)
def test_whatever_order_things_happen_in_every_point_reads_as_it_was(steps: list[tuple[str, str]]) -> None:
    folder = MemoryFolder()
    repository = opened(folder, new=True)
    points: dict[UUID, str] = {}
    for what, blocks in steps:
        folder.now += LATE / 2
        if what == "back up":
            points[back_up(repository, disk(blocks))] = blocks
        elif what == "remove" and points:
            chosen = sorted(points)[len(blocks) % len(points)]
            repository.remove(chosen)
            del points[chosen]
        elif what == "collect":
            collect(repository, now=folder.now)
        for point, was in points.items():
            assert restored(repository, point) == [disk(was).content]
    assert set(Repository(folder, KEY).point_ids()) == set(points)
    assert verify_repository(Repository(folder, KEY)).wrongs == ()


def test_a_limit_holds_for_all_that_is_read_to_decide_and_to_move(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = MemoryFolder()
    repository, _, _ = a_quarter_needed(folder)
    folder.now += LATE
    passed: list[int] = []
    monkeypatch.setattr(Bucket, "take", lambda bucket, amount, *_: passed.append(amount))
    looked: list[int] = []
    collected = collect(repository, now=folder.now, bandwidth_bps=MIB, on_looked=looked.append)
    assert collected.bytes_moved > 0
    assert sum(passed) == looked[-1] + collected.bytes_moved
