"""Where chunks lie: what the index says is what a plain dictionary of the footers says, with the cache or without it."""

import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synvirt.errors import RepositoryDamaged, StoreWriteFailed
from synvirt.repository import footers, packs
from synvirt.repository import index as indexes
from synvirt.repository.index import Index
from synvirt.repository.repository import Repository
from synvirt.repository.verify import verify_repository
from tests.cases import cases
from tests.repository.folders import Counted, MemoryFolder, io_error
from tests.repository.points import KEY, back_up, disk, opened, restored


def _name(number: int) -> bytes:
    """Names of which some begin alike, as no keyed hash's do."""
    return bytes([number % 5 + 1]) * 8 + number.to_bytes(24, "big")


def _stored(folder: MemoryFolder, numbers: list[int]) -> tuple[str, int, bytes]:
    pack = packs.Pack()
    for number in numbers:
        pack.add(_name(number), packs.CHUNK, number.to_bytes(4, "big"), 4)
    name, content, tail = pack.closed()
    if f"packs/{name}" not in folder.files:
        folder.write(f"packs/{name}", [content])
    return name, len(content), tail


def _agrees(index: Index, model: dict[str, list[int]]) -> None:
    for number in range(12):
        found = {(place.pack, place.number) for place in index.places(_name(number))}
        assert found == {(pack, at) for pack, all_ in model.items() for at, one in enumerate(all_) if one == number}
    assert set(index.sizes()) == set(model)
    names = b"".join(map(_name, range(12))) + bytes(32)
    known = {_name(number)[:8] for numbers in model.values() for number in numbers}
    assert index.lacking(names) == [number for number in range(12) if _name(number)[:8] not in known]


@cases(60)
@given(
    st.lists(
        st.tuples(st.sampled_from(["add", "update", "remove", "open"]), st.lists(st.integers(0, 11), min_size=1, max_size=6)),
        max_size=12,
    ),
    st.sampled_from([2, 1 << 16]),
    st.sampled_from([1, 100]),
)
def test_the_index_says_what_the_footers_say(steps: list[tuple[str, list[int]]], recent_max: int, few: int) -> None:
    folder, model = MemoryFolder(), dict[str, list[int]]()
    folder.make_folders(["packs"])
    index = Index(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(indexes, "_RECENT_MAX", recent_max)
        patch.setattr(footers, "_FEW", few)
        for what, numbers in steps:
            if what == "remove" and model:
                gone = sorted(model)[numbers[0] % len(model)]
                folder.delete(f"packs/{gone}")
                del model[gone]
            elif what in ("add", "update"):
                name, size_bytes, tail = _stored(folder, numbers)
                model[name] = numbers
                if what == "add":
                    index.add(name, size_bytes, tail)
            if what == "open":
                index = Index(folder)
            if what != "add":
                assert index.update({entry.name: entry.size_bytes for entry in folder.entries("packs")}) == {}
                _agrees(index, model)
        _agrees(index, model)  # also right behind what was added


def _emptied(path: Path) -> None:
    path.write_bytes(b"")


def _garbled(path: Path) -> None:
    path.write_bytes(b"no database" * 1000)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:5000])


def _other_footers(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("UPDATE footers SET tail = substr(tail, 1, 40) || x'FF' || substr(tail, 42)")
    db.close()


@pytest.mark.parametrize("damage", [Path.unlink, _emptied, _garbled, _cut, _other_footers])
def test_the_cache_can_be_lost_or_damaged(damage: Callable[[Path], object], tmp_path: Path) -> None:
    folder, cache = MemoryFolder(), tmp_path / "caches/one"
    point = back_up(opened(folder, new=True), disk("AAAABBBB"))
    for _ in range(2):
        repository = Repository(folder, KEY, cache=cache)
        repository.close()
    damage(cache)
    for _ in range(2):
        repository = Repository(folder, KEY, cache=cache)
        assert repository.unreadable == {}
        assert restored(repository, point) == [disk("AAAABBBB").content]
        repository.close()


def test_what_is_in_the_cache_is_not_fetched_again_and_damage_is_found_nevertheless(tmp_path: Path) -> None:
    folder, cache = MemoryFolder(), tmp_path / "cache"
    point = back_up(opened(folder, new=True), disk("AAAABBBB"))
    Repository(folder, KEY, cache=cache).close()
    (name,) = (name for name in folder.files if name.startswith("packs/"))
    whole = folder.files[name].content
    folder.files[name].content = whole[:-1] + b"?"  # the footer's end
    repository = Repository(folder, KEY, cache=cache)
    assert restored(repository, point) == [disk("AAAABBBB").content]
    assert "changed" in verify_repository(repository).wrongs[0]
    assert Repository(folder, KEY).unreadable
    repository.close()
    folder.files[name].content = whole[:-1]
    repository = Repository(folder, KEY, cache=cache)
    assert repository.unreadable
    with pytest.raises(RepositoryDamaged):
        restored(repository, point)
    repository.close()


@pytest.mark.parametrize("stop_at", range(4))
def test_packs_of_a_place_that_was_away_meanwhile_are_all_found(stop_at: int) -> None:
    """What was read until then counted as known, and was never found."""
    folder = MemoryFolder()
    folder.make_folders(["packs"])
    for number in range(4):
        _stored(folder, [number])
    there = {entry.name: entry.size_bytes for entry in folder.entries("packs")}
    index = Index(Counted(folder, stop_at=stop_at, error=io_error, again=False))
    with pytest.raises(StoreWriteFailed):
        index.update(there)
    assert index.update(there) == {}
    assert index.lacking(b"".join(map(_name, range(4)))) == []
    assert [len(list(index.places(_name(number)))) for number in range(4)] == [1] * 4
