"""Source against rehearsed guest: what differs is graded, and nothing that differs is called the same."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synvirt.model.job import Difference
from synvirt.rehearsals.sameness import compared

MAC = "addresses of 52:54:00:77:00:05"
SOURCE = {
    "host name": "web01",
    "system": "Debian GNU/Linux 12 (bookworm)",
    "kernel": "6.1.0-30-amd64",
    "time zone": "CET",
    MAC: "10.77.0.5/24, fd00::5/64",
    "file system /": "ext4, 5000000000 of 9000000000 bytes",
    "file system /srv": "xfs, 100 of 9000 bytes",
}


def grades(clone: dict[str, str]) -> dict[str, str]:
    return {one.item: one.grade for one in compared(SOURCE, clone, ()) if one.grade != "same"}


def test_a_guest_that_is_as_it_was_has_nothing_to_look_at() -> None:
    assert grades(dict(SOURCE)) == {}
    assert len(compared(SOURCE, dict(SOURCE), ())) == len(SOURCE)


@pytest.mark.parametrize(
    ("item", "here", "grade"),
    [
        ("host name", "localhost", "wrong"),
        ("host name", "WEB01.example", "expected"),
        ("host name", None, "wrong"),
        ("system", "Debian GNU/Linux 11", "wrong"),
        ("kernel", "5.10.0", "look"),
        ("kernel", None, "look"),
        ("time zone", "UTC", "wrong"),
        (MAC, "fd00::5/64", "wrong"),
        (MAC, "10.77.0.5/24, 10.77.0.9/24, fd00::5/64", "look"),
        (MAC, None, "wrong"),
        ("file system /", "ext4, 5000004096 of 9000000000 bytes", "expected"),
        ("file system /", "ext4, 1000000000 of 9000000000 bytes", "look"),
        ("file system /", "ext4, 5000000000 of 8000000000 bytes", "look"),
        ("file system /", "xfs, 5000000000 of 9000000000 bytes", "wrong"),
        ("file system /", "ext4", "look"),
        ("file system /", ", 5000000000 of 8900000000 bytes", "expected"),
        ("file system /", "EXT4, 5000000001 of 9000000000 bytes", "expected"),
        ("file system /srv", None, "wrong"),
    ],
)
def test_what_differs_is_graded(item: str, here: str | None, grade: str) -> None:
    clone = {**SOURCE, item: here} if here is not None else {name: value for name, value in SOURCE.items() if name != item}
    assert grades({name: value for name, value in clone.items() if value is not None}) == {item: grade}


def test_what_is_wrong_comes_first_and_the_move_explains_itself() -> None:
    moved = Difference(what="disk bus", source="scsi", here="virtio", why="the fastest; the guest has its drivers")
    rows = compared(SOURCE, {**SOURCE, "host name": "other", "users": "root"}, (moved,))
    assert [(one.item, one.grade) for one in rows][:3] == [("host name", "wrong"), ("users", "look"), ("disk bus", "expected")]


@pytest.mark.parametrize(("source", "clone"), [({}, SOURCE), (SOURCE, {}), ({}, {})])
def test_one_who_says_nothing_is_no_difference(source: dict[str, str], clone: dict[str, str]) -> None:
    assert compared(source, clone, ()) == ()


WORDS = st.one_of(st.sampled_from([*SOURCE, "users"]), st.text(max_size=20))
FACTS = st.dictionaries(WORDS, st.one_of(st.sampled_from([*SOURCE.values()]), st.text(max_size=60)), max_size=8)


@given(FACTS, FACTS)
def test_same_is_what_is_equal(source: dict[str, str], clone: dict[str, str]) -> None:
    for one in compared(source, clone, ()):
        assert (one.grade == "same") is (one.source == one.clone)
        assert one.reason or one.grade == "same"
