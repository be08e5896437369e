"""What a peer keeps whatever its other host asks: by its own clock, and by what it finds in its own files."""

import time
from pathlib import Path
from random import Random
from uuid import UUID, uuid4

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from synvirt.errors import (
    BackupBadRequest,
    BackupConflict,
    BackupImmutable,
    BackupNotFound,
    RepositoryDamaged,
    RepositoryFull,
    RepositoryUnreachable,
)
from synvirt.repository import key_change, packs
from synvirt.repository import manifest as manifests
from synvirt.repository.folder import Entry, HostFolder
from synvirt.repository.garbage import collect
from synvirt.repository.manifest import file_name
from synvirt.repository.peer_offer import DAY_S, PIECE_BYTES, Offer
from synvirt.repository.repository import HEADER, Repository, change_key
from synvirt.sizes import MIB
from tests.cases import cases
from tests.fakes.disks import MemoryReader
from tests.repository.points import KEY, back_up, disk, opened, restored

KEEP_S = 30 * DAY_S
OTHER_KEY = bytes(range(1, 33))


class OfferFolder:
    """An offer as a repository sees it, without the network between."""

    def __init__(self, offer: Offer) -> None:
        self.offer = offer
        self._pieces: dict[str, bytes] = {}

    def make_folders(self, names: object) -> None:
        self.offer.make_folders()

    def write(self, name: str, pieces: object) -> None:
        self._pieces[name] = b"".join(map(bytes, pieces))  # type: ignore[call-overload]

    def sync(self, name: str) -> None: ...

    def sync_folder(self, folder: str) -> None: ...

    def rename(self, old: str, new: str) -> None:
        self.put(new, self._pieces.pop(old))

    def put(self, name: str, content: bytes) -> None:
        receiving = self.offer.begin(name, len(content))
        try:
            receiving.feed(content[: len(content) // 2])
            receiving.feed(content[len(content) // 2 :])
            receiving.finish()
        finally:
            receiving.discard()

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        size, pieces = self.offer.read(name, offset, length)
        content = b"".join(pieces)
        assert len(content) == size
        return content

    def entries(self, folder: str) -> list[Entry]:
        return self.offer.entries(folder)

    def delete(self, name: str) -> None:
        if not name.startswith("tmp/"):
            self.offer.delete(name)

    def clock(self) -> float:
        return time.time()

    def close(self) -> None: ...


class Clock:
    """Seconds since 1970, later than the files' own by this many."""

    def __init__(self) -> None:
        self.later = 0.0

    def __call__(self) -> float:
        return time.time() + self.later


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def folder(tmp_path: Path, clock: Clock) -> OfferFolder:
    return OfferFolder(Offer(tmp_path, keep_s=KEEP_S, clock=clock))


def _noise(seed: int = 3) -> MemoryReader:
    found = disk("AAAABBBBCCCCDDDD")
    found.content = Random(seed).randbytes(len(found.content))
    return found


def _packs(folder: OfferFolder) -> list[str]:
    return [f"packs/{entry.name}" for entry in folder.entries("packs")]


def test_a_point_and_all_that_it_needs_stay_for_so_long(folder: OfferFolder, clock: Clock, tmp_path: Path) -> None:
    repository = opened(folder, new=True)
    point = back_up(repository, _noise())
    for name in (file_name(point), *_packs(folder), HEADER):
        with pytest.raises(BackupImmutable):
            folder.delete(name)
    clock.later = KEEP_S - 60
    with pytest.raises(BackupImmutable, match=r"30\.0 days ago, and is kept here for 30"):
        repository.remove(point)
    assert restored(Repository(HostFolder(tmp_path), KEY), point) == [_noise().content]
    clock.later = KEEP_S + 60
    for name in _packs(folder):
        with pytest.raises(BackupImmutable, match="restore points need"):
            folder.delete(name)
    repository.remove(point)
    for name in _packs(folder):
        folder.delete(name)
    assert _packs(folder) == []
    with pytest.raises(BackupImmutable):
        folder.delete(HEADER)


def test_what_an_old_point_and_a_young_one_share_stays_with_the_young_one(folder: OfferFolder, clock: Clock) -> None:
    repository = opened(folder, new=True)
    old = back_up(repository, _noise())
    (first,) = _packs(folder)
    part = disk("AAAA")
    part.content = _noise().content[: len(part.content)]
    young = back_up(repository, part)
    clock.later = KEEP_S + 60
    repository.remove(old)
    with pytest.raises(BackupImmutable):
        folder.delete(first)
    assert restored(Repository(folder, KEY), young) == [part.content]


def test_frames_that_are_packed_again_may_leave_their_old_pack(folder: OfferFolder, clock: Clock) -> None:
    repository = opened(folder, new=True)
    old = back_up(repository, _noise())
    part = disk("AAAA")
    part.content = _noise().content[: len(part.content)]
    young = back_up(repository, part)
    clock.later = KEEP_S + 60
    repository.remove(old)
    assert collect(repository, now=clock()).bytes_moved > 0
    assert collect(repository, now=clock() + 2 * DAY_S).packs_deleted == 1
    assert restored(Repository(folder, KEY), young) == [part.content]


def test_a_pack_that_only_claims_to_have_a_chunk_saves_nobody_from_keeping_the_one_that_has(
    folder: OfferFolder, tmp_path: Path
) -> None:
    """Somebody who has taken the other host over sends packs whose footers are lies, and asks for the true ones' removal."""
    repository = opened(folder, new=True)
    point = back_up(repository, _noise())
    (true,) = _packs(folder)
    entries = repository.index.entries(true.removeprefix("packs/"))
    for keep_hash in (False, True):
        forged = packs.Pack()
        for entry in entries:
            forged.add(entry.name, entry.kind, bytes(entry.length), entry.content_length)
        name, content, tail = forged.closed()
        if keep_hash:  # the footer names the true frames' hashes; what lies there is zeros
            footer = b"".join(
                packs._ENTRY.pack(one.name, one.kind, one.offset, one.length, one.content_length, one.hash) for one in entries
            )
            digest = blake3(footer).digest()
            content[-len(tail) :] = footer + packs._END.pack(len(footer), digest, packs.END_MAGIC)
            name = f"{blake3(content).hexdigest()}.pack"
        folder.put(f"packs/{name}", bytes(content))
        with pytest.raises(BackupImmutable):
            folder.delete(true)
        (tmp_path / "packs" / name).unlink()
    assert restored(Repository(folder, KEY), point) == [_noise().content]


def _pack(folder: OfferFolder, *frames: tuple[bytes, int, bytes, int]) -> str:
    """A pack of these frames: name, kind, bytes, length of the content."""
    made = packs.Pack()
    for frame in frames:
        made.add(*frame)
    name, content, _ = made.closed()
    folder.put(f"packs/{name}", bytes(content))
    return f"packs/{name}"


def test_neither_false_pages_nor_a_damaged_one_let_anything_go_that_the_true_one_needs(
    folder: OfferFolder, tmp_path: Path
) -> None:
    """Only the owner's key says which of the pages of one name is the true one."""
    repository = opened(folder, new=True)
    point = back_up(repository, _noise())
    (whole,) = _packs(folder)
    entries = repository.index.entries(whole.removeprefix("packs/"))
    frames = [
        (one.name, one.kind, folder.read(whole, one.offset, one.length), one.content_length)
        for one in sorted(entries, key=lambda one: one.kind)
    ]
    chunks, page = _pack(folder, *frames[:-1]), _pack(folder, frames[-1])
    folder.delete(whole)  # all of it lies in these two
    name, kind, _, length = frames[-1]
    for content in (bytes(length), b"\1" * length, b"\2" * length):
        _pack(folder, (name, kind, content, length))
    for needed in (chunks, page):
        with pytest.raises(BackupImmutable, match="restore points need"):
            folder.delete(needed)
    assert restored(Repository(folder, KEY), point) == [_noise().content]
    true = (tmp_path / page).read_bytes()
    (tmp_path / page).write_bytes(true[:-1])
    with pytest.raises(BackupImmutable, match="cannot be read"):
        folder.delete(chunks)
    (tmp_path / page).write_bytes(true)
    _pack(folder, (name, kind, b"no page", length))
    with pytest.raises(BackupImmutable, match="has 7 bytes"):
        OfferFolder(Offer(tmp_path, keep_s=KEEP_S)).delete(chunks)


def test_nothing_is_replaced_but_what_is_damaged(folder: OfferFolder, tmp_path: Path) -> None:
    repository = opened(folder, new=True)
    point = back_up(repository, _noise())
    other = back_up(repository, disk("AAAA"))
    one, two = (folder.read(file_name(id_)) for id_ in (point, other))
    folder.put(file_name(point), one)
    anew = manifests.read(manifests.unread(str(point), one, repository.keys))
    with pytest.raises(BackupConflict):  # the same point, sealed once more
        folder.put(file_name(point), manifests.written(anew, repository.keys))
    with pytest.raises(BackupBadRequest):
        folder.put(file_name(point), two)
    with pytest.raises(BackupConflict):
        opened(OfferFolder(Offer(tmp_path, keep_s=0)), new=True)
    name = _packs(folder)[0]
    whole = folder.read(name)
    (tmp_path / name).write_bytes(whole[:100])
    folder.put(name, whole)
    assert folder.read(name) == whole
    (tmp_path / file_name(point)).write_bytes(one[:-2])
    folder.put(file_name(point), one)
    assert restored(Repository(folder, KEY), point) == [_noise().content]


def test_what_comes_is_checked_and_what_is_refused_leaves_nothing(folder: OfferFolder, tmp_path: Path) -> None:
    repository = opened(folder, new=True)
    point = back_up(repository, _noise())
    (name,) = _packs(folder)
    whole, manifest = bytearray(folder.read(name)), folder.read(file_name(point))
    whole[100] ^= 1
    no_pack = blake3(b"no pack").hexdigest()
    for wrong, content in (
        (name, bytes(whole)),
        (f"packs/{no_pack}.pack", b"no pack"),
        (f"condemned/{no_pack}", b"no pack"),
        (f"condemned/{no_pack}", f"{no_pack}.pack\n".encode()),
        (file_name(uuid4()), manifest),
        (file_name(point), manifest.replace(b"format", b"fOrmat")),
        (f"points/{point}.kept", b"x"),
        (HEADER, b"{}\n"),
    ):
        with pytest.raises(BackupBadRequest):
            folder.put(wrong, content)
    receiving = folder.offer.begin(name, 100)
    receiving.feed(b"x" * 60)
    with pytest.raises(BackupBadRequest, match="announced"):
        receiving.feed(b"x" * 41)
    receiving.discard()
    receiving = folder.offer.begin(name, 100)
    receiving.feed(b"x" * 60)
    with pytest.raises(BackupBadRequest, match="40 of the 100"):
        receiving.finish()
    receiving.discard()
    with pytest.raises(BackupBadRequest, match="the most"):
        folder.offer.begin(name, packs.PACK_BYTES + 1)
    assert list((tmp_path / "tmp").iterdir()) == []
    assert restored(Repository(folder, KEY), point) == [_noise().content]


def test_what_is_answered_is_durable(folder: OfferFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other host relies on it from then on: a manifest is sent after its packs."""
    folder.make_folders(())
    done: list[str] = []

    def noted(call: str) -> None:
        real = getattr(HostFolder, call)

        def called(self: HostFolder, *names: str) -> None:
            done.append(call)
            real(self, *names)

        monkeypatch.setattr(HostFolder, call, called)

    for call in ("sync", "rename", "sync_folder", "delete"):
        noted(call)
    content = b"0" * 64 + b".pack\n"
    name = f"condemned/{blake3(content).hexdigest()}"
    folder.put(name, content)
    assert done == ["sync", "rename", "sync_folder", "delete"]
    done.clear()
    folder.delete(name)
    assert done == ["delete", "sync_folder"]


def test_a_key_changes_only_so_often(folder: OfferFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each change is a file that nobody removes, and each opening of the repository reads all of them."""
    opened(folder, new=True)
    monkeypatch.setattr(key_change, "CHANGES_MAX", 1)
    change_key(folder, KEY, OTHER_KEY)
    with pytest.raises(BackupConflict, match="1 times at most"):
        change_key(folder, OTHER_KEY, bytes(32))
    Repository(folder, OTHER_KEY)


@cases(200)
@given(
    st.one_of(
        st.text(max_size=80),
        st.sampled_from(
            ["", ".", "..", "/", "packs", "packs/", "packs/..", "../repository", "repository/", "tmp/x", "points/a.point"]
        ),
        st.from_regex(r"(packs|points|condemned|tmp)/[0-9a-fA-F./\\-]{0,80}", fullmatch=True),
    )
)
def test_no_other_names_are_taken_read_or_removed(name: str) -> None:
    offer = Offer(Path("/nowhere/at/all"), keep_s=0)
    for ask in (lambda: offer.begin(name, 10), lambda: offer.read(name, 0, 1), lambda: offer.delete(name)):
        # A name that a repository's file may have gets as far as the folder, which is not there.
        with pytest.raises((BackupBadRequest, RepositoryUnreachable)):
            ask()


def test_a_damaged_pack_or_point_lets_nothing_be_removed(folder: OfferFolder, clock: Clock, tmp_path: Path) -> None:
    repository = opened(folder, new=True)
    gone, stays = back_up(repository, _noise()), back_up(repository, disk("AAAA"))
    clock.later = KEEP_S + 60
    repository.remove(gone)
    (path,) = (tmp_path / "points").iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    for name in _packs(folder):
        with pytest.raises(BackupImmutable, match="cannot be read"):
            folder.delete(name)
    path.write_bytes(whole)
    pack = repository.place(bytes.fromhex(repository.shown(stays).disks[0].pages[0]))
    assert pack is not None
    (tmp_path / "packs" / pack.pack).unlink()
    for name in _packs(folder):
        with pytest.raises(BackupImmutable, match="cannot be read"):
            folder.delete(name)


def test_what_a_killed_service_had_begun_is_swept_and_nothing_else(tmp_path: Path) -> None:
    folder = OfferFolder(Offer(tmp_path, keep_s=0))
    opened(folder, new=True)
    (tmp_path / "tmp/peer-0123456789abcdef").write_bytes(b"half a pack")
    (tmp_path / "tmp/0123456789abcdef").write_bytes(b"of a run of this host")
    again = Offer(tmp_path, keep_s=0)
    assert (again.entries("packs"), again.entries("tmp")) == ([], [])
    assert [path.name for path in (tmp_path / "tmp").iterdir()] == ["0123456789abcdef"]


def test_what_is_not_there_is_said(folder: OfferFolder, tmp_path: Path) -> None:
    with pytest.raises(RepositoryUnreachable):
        folder.entries("packs")
    with pytest.raises(BackupBadRequest):
        folder.entries("../etc")
    opened(folder, new=True)
    with pytest.raises(RepositoryDamaged, match="missing"):
        folder.read(file_name(UUID(int=5)))
    folder.delete(file_name(UUID(int=5)))


def test_a_pack_is_sent_in_pieces(tmp_path: Path) -> None:
    """24 callers who asked for a pack of 64 MiB and did not read took the service to 3 GiB."""
    offer = Offer(tmp_path, keep_s=0)
    offer.make_folders()
    name = f"packs/{'a' * 64}.pack"
    content = Random(5).randbytes(3 * PIECE_BYTES + 5)
    (tmp_path / name).write_bytes(content)
    size, pieces = offer.read(name, 7, None)
    found = list(pieces)
    assert (size, b"".join(found)) == (len(content) - 7, content[7:])
    assert max(map(len, found)) <= PIECE_BYTES
    with pytest.raises(RepositoryDamaged, match="ends at"):
        offer.read(name, len(content), 1)


def test_a_protected_point_stays_until_who_runs_the_peer_lets_it_go(folder: OfferFolder, clock: Clock, tmp_path: Path) -> None:
    repository = opened(folder, new=True)
    point = back_up(repository, _noise())
    repository.keep(point, kept=True)
    clock.later = KEEP_S + 60
    for name in (file_name(point), f"points/{point}.kept", *_packs(folder)):
        with pytest.raises(BackupImmutable):
            folder.delete(name)
    assert folder.offer.held().protected == (str(point),)
    folder.offer.release(point)
    with pytest.raises(BackupNotFound):
        folder.offer.release(point)
    assert folder.offer.held().protected == ()
    repository.remove(point)
    assert folder.offer.held().points == ()


def test_a_clock_of_the_peer_that_was_behind_lets_nothing_go(folder: OfferFolder, clock: Clock) -> None:
    """A file that seems to come from the future is no older for it."""
    point = back_up(opened(folder, new=True), _noise())
    clock.later = -10 * KEEP_S
    with pytest.raises(BackupImmutable, match=r"0\.0 days ago"):
        folder.delete(file_name(point))


QUOTA = 64 * MIB


def test_a_quota_holds_for_what_is_there_and_on_its_way(tmp_path: Path) -> None:
    folder = OfferFolder(Offer(tmp_path, keep_s=0, quota_bytes=QUOTA))
    repository = opened(folder, new=True)
    point = back_up(repository, _noise())
    used = folder.offer.room()[1]
    assert (
        used
        == folder.offer.held().used_bytes
        == sum(max(one.stat().st_size, 4096) for one in tmp_path.rglob("*") if one.is_file())
    )
    assert folder.offer.room()[0] == QUOTA
    usable = QUOTA - QUOTA // 16
    coming = folder.offer.begin(f"packs/{'0' * 64}.pack", usable - used - 4096)
    folder.offer.begin(f"points/{uuid4()}.kept", 0).discard()
    last = folder.offer.begin(f"points/{uuid4()}.kept", 0)
    with pytest.raises(RepositoryFull, match="and 0 of the quota"):
        folder.offer.begin(f"points/{uuid4()}.kept", 0)
    folder.offer.begin(f"condemned/{'0' * 64}", 70).discard()  # or what is full could never be emptied
    last.discard()
    coming.discard()
    repository.remove(point)
    for name in _packs(folder):
        folder.delete(name)
    assert folder.offer.room()[1] == folder.offer.held().used_bytes == 4096, "the header"


def test_a_file_that_cannot_be_begun_takes_nothing_of_the_quota(tmp_path: Path) -> None:
    folder = OfferFolder(Offer(tmp_path, keep_s=KEEP_S, quota_bytes=4 * MIB))
    folder.make_folders(())
    unfinished, name = tmp_path / "tmp", f"packs/{'0' * 64}.pack"
    for _ in range(3):
        unfinished.rmdir()
        with pytest.raises(RepositoryUnreachable):
            folder.offer.begin(name, 3 * MIB)
        unfinished.mkdir()
    folder.offer.begin(name, 3 * MIB).discard()


def test_a_million_empty_files_are_more_than_a_quota(tmp_path: Path) -> None:
    folder = OfferFolder(Offer(tmp_path, keep_s=0, quota_bytes=40 * 4096))
    opened(folder, new=True)

    def fill() -> None:
        for _ in range(1000):
            folder.put(f"points/{uuid4()}.kept", b"")

    with pytest.raises(RepositoryFull):
        fill()
    assert len(folder.entries("points")) < 40
    for one in (tmp_path / "points").iterdir():  # by who runs the peer, by hand
        one.unlink()
    folder.put(f"points/{uuid4()}.kept", b"")
