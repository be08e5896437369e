"""A verification that goes on from where another was cut off reads the rest, and finds what one that reads all finds."""

import threading
from random import Random
from typing import TypeVar, cast
from uuid import uuid4

import pytest

from synvirt.backups.orders import PacksSeen
from synvirt.jobs import dataclass_json
from synvirt.jobs.process import LINE_BYTES_MAX
from synvirt.jobs.wire import Result
from synvirt.repository import packs
from synvirt.repository.keys import CHUNK_BYTES
from synvirt.repository.manifest import PAGE_BYTES
from synvirt.repository.repository import Repository
from synvirt.repository.verify import (
    LISTED_MAX,
    PacksLooked,
    PointLooked,
    Report,
    judged,
    look_at_packs,
    verify_point,
    verify_repository,
)
from tests.fakes.disks import MemoryReader
from tests.repository.folders import MemoryFolder
from tests.repository.points import KEY, back_up, chunks_read, disk, opened

CHUNKS = 5
Mark = TypeVar("Mark", PointLooked, PacksLooked)


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> MemoryFolder:
    """A chunk a pack, each written a second after the one before."""
    monkeypatch.setattr(packs, "PACK_BYTES", CHUNK_BYTES)
    made = MemoryFolder()
    write = made.write

    def later(name: str, pieces: object) -> None:
        made.now += 1
        write(name, pieces)  # type: ignore[arg-type]

    made.write = later  # type: ignore[method-assign]
    return made


def noise() -> MemoryReader:
    found = disk("AAAA" * CHUNKS)
    found.content = Random(5).randbytes(len(found.content))
    return found


def damaged(folder: MemoryFolder, number: int) -> str:
    """The pack that has that chunk is not what was written; its name."""
    made = sorted((file.at, name) for name, file in folder.files.items() if name.startswith(packs.FOLDER))
    name = made[number][1]
    content = bytearray(folder.files[name].content)
    content[100] ^= 1
    folder.files[name].content = bytes(content)
    return name.rpartition("/")[2]


def over_the_wire(mark: Mark) -> Mark:
    """As a worker gets it."""
    return cast("Mark", dataclass_json.load(type(mark), dataclass_json.dump(mark)))


@pytest.mark.parametrize("wrong", [None, 0, CHUNKS - 1])
def test_a_point(folder: MemoryFolder, wrong: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = opened(folder, new=True)
    point = back_up(repository, noise(), threads=1)
    if wrong is not None:
        damaged(folder, wrong)
    marks = [PointLooked()]
    whole = verify_point(repository, point, on_looked=marks.append)
    assert (whole.chunks, whole.bytes_read) == (CHUNKS, CHUNKS * CHUNK_BYTES)
    assert (whole.wrong is None, len(whole.broken)) == (wrong is None, wrong is not None)
    assert marks[-1].chunks == CHUNKS
    read = chunks_read(monkeypatch)
    for mark in marks:
        read.clear()
        assert verify_point(Repository(folder, KEY), point, since=over_the_wire(mark)) == whole
        assert len(read) == CHUNKS - mark.chunks


@pytest.mark.parametrize("of", ["a chunk of two disks", "a list of chunks"])
def test_a_point_says_which_of_its_disks_are_damaged(folder: MemoryFolder, of: str) -> None:
    """The others can be restored."""
    repository, twin, other = opened(folder, new=True), noise(), noise()
    other.content = other.content[::-1]
    point = back_up(repository, noise(), other, twin, threads=1)
    assert verify_point(repository, point).disks == ()
    if of == "a list of chunks":
        place = repository.place(bytes.fromhex(repository.manifest(point).shown.disks[1].pages[0]))
        assert place is not None
        content = bytearray(folder.files[f"packs/{place.pack}"].content)
        content[place.entry.offset] ^= 1
        folder.files[f"packs/{place.pack}"].content = bytes(content)
    else:
        damaged(folder, 0)
    marks = [PointLooked()]
    found = verify_point(repository, point, on_looked=marks.append)
    assert found.disks == ((1,) if of == "a list of chunks" else (0, 2))
    assert found.chunks == (2 if of == "a list of chunks" else 3) * CHUNKS, "all of the other disks is read"
    assert [verify_point(repository, point, since=over_the_wire(mark)) == found for mark in marks] == [True] * len(marks)


@pytest.mark.parametrize("wrong", [None, 0, CHUNKS - 1])
def test_a_repository(folder: MemoryFolder, wrong: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = opened(folder, new=True)
    back_up(repository, noise(), threads=1)
    broken = None if wrong is None else damaged(folder, wrong)
    marks: list[PacksLooked] = []
    whole = look_at_packs(repository, on_looked=marks.append)
    assert [mark.packs for mark in marks] == list(range(1, len(repository.pack_sizes()) + 1))
    pages: list[int] = []
    report = judged(repository, whole, on_pages=pages.append)
    assert pages == [PAGE_BYTES], "or a worker would be ended that says nothing for hours"
    assert report.damaged_packs == (() if broken is None else (broken,))
    assert len(report.damaged_points) == len(report.damaged_packs)
    assert report.bytes_read == sum(repository.pack_sizes().values())
    later = back_up(repository, disk("ZZZZ"), threads=1)
    new = set(repository.pack_sizes()) - {mark.pack for mark in marks}
    read: list[str] = []
    check_whole = packs.check_whole

    def counted(folder: object, name: str, *rest: object, **named: object) -> None:
        read.append(name)
        check_whole(folder, name, *rest, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(packs, "check_whole", counted)
    for mark in marks:
        read.clear()
        again = Repository(folder, KEY)
        found = judged(again, look_at_packs(again, since=over_the_wire(mark)))
        assert set(read) == new | {one.pack for one in marks[mark.packs :]}, "what came meanwhile is looked at, too"
        assert len(read) == len(set(read))
        assert (found.damaged_packs, found.packs) == (report.damaged_packs, report.packs + len(new))
        assert later not in found.damaged_points


def test_one_thread_is_the_callers(folder: MemoryFolder) -> None:
    repository = opened(folder, new=True)
    back_up(repository, noise(), threads=1)
    broken, callers = damaged(folder, 1), set[int]()

    def read(total: int, done: int) -> None:
        callers.add(threading.get_ident())

    looked = look_at_packs(repository, on_progress=read, threads=1)
    assert (set(looked.broken), looked.packs) == ({broken}, len(repository.pack_sizes()))
    assert callers == {threading.get_ident()}


def test_a_broken_pack_that_is_gone_is_not_reported(folder: MemoryFolder) -> None:
    repository = opened(folder, new=True)
    back_up(repository, noise(), threads=1)
    repository.remove(back_up(repository, disk("ZZZZ"), threads=1))
    broken = damaged(folder, -1)
    looked = look_at_packs(repository)
    assert [*looked.broken] == [broken]
    folder.delete(f"{packs.FOLDER}/{broken}")
    again = Repository(folder, KEY)
    assert judged(again, look_at_packs(again, since=looked)).wrongs == ()


@pytest.mark.parametrize("read", ["footer", "bytes"])
@pytest.mark.parametrize("needed", [False, True])
def test_a_pack_that_goes_meanwhile_is_damaged_only_if_a_point_needs_it(
    folder: MemoryFolder, read: str, needed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collection deletes it after it was listed, and before its footer, or its bytes, are read."""
    repository = opened(folder, new=True)
    before = {name for name in folder.files if name.startswith(packs.FOLDER)}
    point = back_up(repository, disk("ZZZZ"), threads=1)
    gone = {name for name in folder.files if name.startswith(packs.FOLDER)} - before
    back_up(repository, noise(), threads=1)
    if not needed:
        repository.remove(point)
    looking = opened(folder) if read == "bytes" else None
    name = "check_whole" if read == "bytes" else "read_tail"
    real = getattr(packs, name)

    def late(*given: object, **named: object) -> object:
        for one in gone:
            folder.delete(one)
        return real(*given, **named)

    monkeypatch.setattr(packs, name, late)
    looking = looking or opened(folder)
    assert looking.unreadable == {}
    report = verify_repository(looking)
    assert report.damaged_packs == ()
    assert report.damaged_points == ((point,) if needed else ())
    assert len(report.wrongs) == needed


def test_what_was_found_is_not_copied_for_each_pack_in_which_it_was(folder: MemoryFolder) -> None:
    """Of half a million damaged packs that would take days."""
    repository = opened(folder, new=True)
    point = back_up(repository, noise(), threads=1)
    for number in range(CHUNKS):
        damaged(folder, number)
    found: list[dict[str, str]] = []
    look_at_packs(repository, on_looked=lambda looked: found.append(looked.broken))
    assert len(found) > CHUNKS
    assert all(one is found[0] for one in found)
    found.clear()
    verify_point(Repository(folder, KEY), point, on_looked=lambda looked: found.append(looked.broken))
    assert all(one is found[0] for one in found)
    assert len(found[0]) == CHUNKS
    before = PacksLooked()
    assert PacksLooked(broken={"a": "b"}).after(before).broken is before.broken


@pytest.mark.parametrize("count", [0, 1, LISTED_MAX, LISTED_MAX + 1, 7 * LISTED_MAX])
def test_parts_are_short_and_lose_nothing(count: int) -> None:
    """Names of 255 bytes that no encoding has: a file of a hostile repository may be called so."""
    names = [f"{number:06}" + "\udc80" * 249 for number in range(count)]
    broken = {name: f"pack {name} has changed" for name in names}
    known = PacksLooked(bytes_read=1, packs=1, broken=dict([*broken.items()][: count // 3]))
    seen, received = PacksLooked(bytes_read=9, packs=count, broken=broken), known
    parts = [*seen.parts(known, len(known.broken))]
    for part in parts:
        assert received.bytes_read == known.bytes_read, "only the last says how far it is"
        line = Result(name="looked", content=dataclass_json.plain(PacksSeen(looked=part))).to_line()
        assert len(line) < LINE_BYTES_MAX
        received = over_the_wire(part).after(received)
    assert received == seen
    ids = tuple(uuid4() for _ in names)
    report, joined = Report(packs=count, wrongs=tuple(names), damaged_points=ids[::2], damaged_packs=()), Report()
    for piece in report.parts():
        assert len(piece.wrongs) <= LISTED_MAX
        joined = piece.after(joined)
    assert joined == report
    listed = report.listed()
    assert len(listed.wrongs) + listed.more_wrongs == count
    assert len(listed.damaged_points) + listed.more_damaged_points == len(ids[::2])
