"""Somebody who may only write to a repository (a peer's account) cannot hide or damage what is in it by adding more to it."""

from uuid import UUID

import pytest
from blake3 import blake3

from synvirt.errors import RepositoryDamaged
from synvirt.repository import packs
from synvirt.repository.folder import put
from synvirt.repository.garbage import GRACE_S, YOUNG_S, collect, condemn
from synvirt.repository.repository import Repository
from synvirt.repository.session import Session
from synvirt.repository.verify import verify_point, verify_repository
from tests.fakes.disks import MemoryReader
from tests.repository.folders import MemoryFolder
from tests.repository.points import KEY, back_up, disk, opened, restored


def a_disk() -> MemoryReader:
    return disk("AAAABBBBCCCC")


def attacked() -> tuple[MemoryFolder, UUID]:
    """A point; then a pack of all its names over other bytes, and a list that condemns the pack that has them."""
    folder = MemoryFolder()
    repository = opened(folder, new=True)
    point = back_up(repository, a_disk())
    own = list(repository.pack_sizes())
    decoy = packs.Pack()
    for pack in own:
        for entry in repository.index.entries(pack):
            decoy.add(entry.name, entry.kind, b"\x00" * entry.length, entry.content_length)
    name, content, _ = decoy.closed()
    put(folder, f"{packs.FOLDER}/{name}", [content])
    condemn(folder, own)
    return folder, point


def test_decoys_hide_nothing() -> None:
    folder, point = attacked()
    repository = Repository(folder, KEY)
    assert restored(repository, point) == [a_disk().content]
    assert verify_point(repository, point).wrong is None
    assert verify_repository(repository).damaged_points == ()


def test_decoys_do_not_make_a_collection_take_the_true_ones() -> None:
    folder, point = attacked()
    for later in (YOUNG_S + 1, GRACE_S + 1, GRACE_S + 1):
        folder.now += later
        collect(Repository(folder, KEY), now=folder.now)
    assert restored(Repository(folder, KEY), point) == [a_disk().content]


def test_a_run_does_not_rely_on_decoys() -> None:
    folder, _ = attacked()
    repository = Repository(folder, KEY)
    again = back_up(repository, a_disk())
    for name, file in list(folder.files.items()):  # what was condemned goes; what the run wrote itself stays
        if name.startswith("condemned/"):
            for pack in file.content.decode().split():
                folder.files.pop(f"{packs.FOLDER}/{pack}", None)
    assert restored(Repository(folder, KEY), again) == [a_disk().content]


def test_where_only_decoys_are_left_verifying_says_so() -> None:
    folder, point = attacked()
    repository = Repository(folder, KEY)
    for name in [name for name in folder.files if name.startswith(f"{packs.FOLDER}/")]:
        entries = repository.index.entries(name.rpartition("/")[2])
        if packs.read_frame(folder, name.rpartition("/")[2], entries[0]).strip(b"\x00"):
            folder.delete(name)
    two = packs.Pack()
    entry = repository.index.entries(next(iter({*repository.pack_sizes()})))[0]
    two.add(entry.name, entry.kind, b"\x01" * entry.length, entry.content_length)
    put(folder, f"{packs.FOLDER}/{two.closed()[0]}", [two.closed()[1]])
    left = Repository(folder, KEY)
    assert verify_repository(left).damaged_points == (point,)
    with pytest.raises(RepositoryDamaged):
        restored(left, point)


HEADERS = {
    "deep": b"[" * 60_000,
    "no object": b"1",
    "without a key": b'{"format":1,"id":"00000000-0000-0000-0000-000000000001"}',
    "without an id": b'{"format":1,"key_check":"a"}',
    "no text": b"\xff\xfe",
    "longer than any": b" " * (64 << 10),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_that_is_none_of_ours_is_an_error_of_the_repository(name: str) -> None:
    folder = MemoryFolder()
    opened(folder, new=True)
    line = HEADERS[name] + b"\n"
    put(folder, "repository", [line, blake3(line).hexdigest().encode() + b"\n"])
    with pytest.raises(RepositoryDamaged, match="«repository»"):
        opened(folder)


def test_a_list_that_is_larger_than_any_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = MemoryFolder()
    opened(folder, new=True)
    content = b"\xff" * 70
    put(folder, f"condemned/{blake3(content).hexdigest()}", [content])
    Session(opened(folder))
    monkeypatch.setattr("synvirt.repository.condemned.BYTES_MAX", 69)
    with pytest.raises(RepositoryDamaged, match="has 70 bytes"):
        Session(opened(folder))
