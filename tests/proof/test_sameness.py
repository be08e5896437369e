"""Source against rehearsed guest: what differs is graded, and nothing that differs is called the same."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synvirt.model.job import Difference
from synvirt.model.rehearsal import Sameness
from synvirt.proof.sameness import KINDS, compared, is_settled, of_disks

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


def graded(item: str, source: str | None, here: str | None, kind: str = "") -> tuple[str, str] | None:
    """Beside another of its kind that both have, so that both tell the kind."""
    other = {kind or item.rpartition(" ")[0] + " other": "x"} if " " in item else {}
    rows = compared(
        {"host name": "a", **other, **({item: source} if source is not None else {})},
        {"host name": "a", **other, **({item: here} if here is not None else {})},
        (),
    )
    return next(((one.grade, one.reason) for one in rows if one.item == item), None)


# Of each kind: two values, and the grades of: another value, none here, none at the source. None: no row.
TABLE: dict[str, tuple[str, str, str, str | None, str | None]] = {
    "host name": ("web", "db", "wrong", "wrong", None),
    "system": ("Debian 12", "Windows", "wrong", "look", None),
    "kernel": ("6.1", "5.10", "look", "look", None),
    "time zone": ("UTC", "Europe/Berlin", "wrong", None, None),
    "clock": ("+0.0 s", "+60.0 s", "look", None, None),
    "addresses of": ("10.0.0.1", "10.0.0.2", "wrong", "wrong", "look"),
    "route": ("via 10.0.0.1", "via 10.0.0.2", "look", "look", "look"),
    "file system": ("ext4", "xfs", "wrong", "wrong", "look"),
    "application": ("1.22", "1.23", "look", "look", None),
    "listens on": ("nginx", "apache2", "look", "wrong", "look"),
    "service": ("runs", "stands", "look", "wrong", "look"),
    "enabled": ("multi-user.target", "graphical.target", "look", "wrong", "look"),
    "user": ("number 1", "number 2", "wrong", "wrong", "look"),
    "mount": ("UUID=1 ext4", "UUID=2 ext4", "look", "wrong", "look"),
    "finds": ("UUID=1", "UUID=2", "look", "look", "look"),
    "configures": ("/etc/a", "/etc/b", "look", "look", "look"),
    "drivers in": ("ahci", "virtio_blk", "look", "look", "look"),
    "volume": ("ext4", "xfs", "wrong", "wrong", "look"),
    "network file": ("10.0.0.1/24; a", "10.0.0.2/24; b", "wrong", "wrong", "look"),
    "firmware": ("uefi", "bios", "wrong", "wrong", None),
    "boot order": ("disk, network", "network, disk", "wrong", "wrong", None),
    "processors": ("2", "4", "wrong", "wrong", None),
    "memory": ("2048 MiB", "1024 MiB", "wrong", "wrong", None),
    "disk": ("100 bytes", "50 bytes", "wrong", "wrong", "look"),
    "network card": ("52:54:00:00:00:01", "52:54:00:00:00:02", "wrong", "wrong", "look"),
}
Cases = tuple[tuple[dict[str, str], dict[str, str], str | None], ...]
ONE_OF_EACH = {"host name", "system", "kernel", "time zone", "clock", "firmware", "boot order", "processors", "memory"}


def test_each_kind_has_its_grades() -> None:
    assert TABLE.keys() == KINDS.keys()
    for kind, (value, other, differs, missing, added) in TABLE.items():
        item = kind if kind in ONE_OF_EACH else f"{kind} it"
        # Both say something, and where there are several of a kind, both say another one.
        reported = {"kernel" if kind == "host name" else "host name": "a", **({} if item == kind else {f"{kind} other": "x"})}
        cases: Cases = (({item: value}, {item: other}, differs), ({item: value}, {}, missing), ({}, {item: value}, added))
        for source, here, grade in cases:
            rows = [one for one in compared({**reported, **source}, {**reported, **here}, ()) if one.item == item]
            assert [one.grade for one in rows] == ([grade] if grade else []), (kind, source, here)
            assert all(one.reason for one in rows)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_what_starts_late_is_waited_for_and_nothing_else(kind: str) -> None:
    """A running guest's programs, its network, and what it mounts."""
    late = kind in {"service", "listens on", "application", "addresses of", "route", "file system"}
    missing = Sameness(item=f"{kind} it", source="a", clone=None, grade="look", reason="it is not there")
    assert is_settled([missing]) is not late
    assert is_settled([missing.model_copy(update={"grade": "expected"}), missing.model_copy(update={"clone": "b"})])


def test_what_disks_tell_is_what_a_running_guest_would_tell_too_and_what_they_hide() -> None:
    facts = {item if item in ONE_OF_EACH else f"{item} it": "a" for item in KINDS} | {"not read disk0": "it is encrypted"}
    of_others = ("enabled", "user", "mount", "finds", "configures", "drivers in", "volume", "network file")
    kept = {"host name", "system", "time zone", *(f"{kind} it" for kind in of_others)}
    assert of_disks(facts).keys() == {*kept, "not read disk0"}


def test_a_part_that_was_not_read_is_a_row_with_its_cause_and_what_that_means() -> None:
    (row,) = (one for one in compared({"system": "a", "not read disk0": "it is encrypted"}, {"system": "a"}, ()) if one.reason)
    assert (row.item, row.source, row.grade) == ("not read disk0", "it is encrypted", "look")
    assert row.reason == "what lies there was not compared"


WHERE = "volume logical volume vg/root"


@pytest.mark.parametrize(
    ("item", "source", "here", "grade"),
    [
        ("service nginx.service", "runs", None, "wrong"),
        ("service nginx.service", None, "runs", "look"),
        ("service open-vm-tools.service", "runs", None, "expected"),
        ("service vgauth.service", "runs", None, "expected"),
        ("service hv-kvp-daemon.service", "runs", None, "expected"),
        ("service xe-linux-distribution.service", "runs", None, "expected"),
        ("service qemu-guest-agent.service", None, "runs", "expected"),
        ("service qemu.service", "runs", None, "wrong"),
        ("listens on tcp 443", "nginx", None, "wrong"),
        ("listens on tcp 443", "nginx", "apache2", "look"),
        ("listens on tcp 443", None, "nginx", "look"),
        ("user web", "number 1000, shell /bin/sh", None, "wrong"),
        ("user web", "number 1000, shell /bin/sh", "number 0, shell /bin/sh", "wrong"),
        ("user web", "has an account", "number 1000, shell /bin/sh", "expected"),
        ("user new", None, "number 1001, shell /bin/sh", "look"),
        ("route default", "via 10.0.0.1", "via 10.0.0.2", "look"),
        ("route default", "via 10.0.0.1", None, "look"),
        ("application nginx", "1.22", "1.23", "look"),
        ("application nginx", "1.22", "runs", "expected"),
        ("application nginx", "1.22", None, "look"),
        ("application ps", None, "runs", None),
        ("enabled nginx.service", "multi-user.target", None, "wrong"),
        ("enabled vmtoolsd.service", "multi-user.target", None, "expected"),
        ("mount /srv", "/dev/sdb1 ext4", "/dev/vdb1 ext4", "expected"),
        ("mount /srv", "UUID=1 ext4", "UUID=2 ext4", "look"),
        ("mount /srv", "UUID=1 ext4", None, "wrong"),
        (WHERE, "btrfs «root» 1f, 100 of 900 bytes", "btrfs «root» 1f, 200 of 900 bytes", "expected"),
        (WHERE, "btrfs «root» 1f, 100 of 900 bytes", "btrfs «root» 2f, 100 of 900 bytes", "wrong"),
        (WHERE, "xfs 1f, 1000000000 of 9000000000 bytes", "xfs 1f, 10 of 9000000000 bytes", "look"),
        (WHERE, "xfs 1f, 1000 of 9000 bytes", None, "wrong"),
        ("network file /etc/netplan/a.yaml", "10.0.0.5/24; aa", "10.0.0.6/24; bb", "wrong"),
        ("network file /etc/netplan/a.yaml", "10.0.0.5/24; aa", "10.0.0.5/24, 10.0.0.6; bb", "look"),
    ],
)
def test_what_runs_and_what_is_set_up_is_graded(item: str, source: str | None, here: str | None, grade: str | None) -> None:
    found = graded(item, source, here)
    assert (found and found[0]) == grade
    assert found is None or found[1], "every difference has its reason"


@pytest.mark.parametrize(
    ("source", "here", "grade"),
    [
        ("+0.2 s", "-1.4 s", "expected"),
        ("+100.0 s", "+101.0 s", "expected"),
        ("+0.1 s", "+7200.9 s", "wrong"),
        ("+0.1 s", "-1799.0 s", "wrong"),
        ("+0.1 s", "+1234.0 s", "look"),
    ],
)
def test_clocks_are_held_against_each_other(source: str, here: str, grade: str) -> None:
    found = graded("clock", source, here)
    assert found is not None
    assert found[0] == grade


@pytest.mark.parametrize(
    ("source", "here", "grade"),
    [("Europe/Berlin", "CET", "expected"), ("CEST", "Europe/Berlin", "expected"), ("Europe/Berlin", "UTC", "wrong"),
     ("../../etc/passwd", "CET", "wrong"), ("America/New_York", "Europe/Berlin", "wrong")],
)  # fmt: skip
def test_a_time_zone_has_several_names(source: str, here: str, grade: str) -> None:
    found = graded("time zone", source, here)
    assert found is not None
    assert found[0] == grade


def test_platforms_that_do_not_tell_prefixes_lose_no_addresses() -> None:
    reported = {MAC: "10.77.0.5, fd00::5"}
    assert {one.item: one.grade for one in compared(reported, {MAC: SOURCE[MAC]}, ())} == {MAC: "expected"}
    assert {one.grade for one in compared(reported, {MAC: "10.77.0.5/24"}, ())} == {"wrong"}


def test_a_fact_that_one_side_never_gives_is_no_difference() -> None:
    here = {**SOURCE, **{f"service {number}.service": "runs" for number in range(50)}}
    assert {one.grade for one in compared(SOURCE, here, ())} == {"same"}


def test_machines_are_compared_and_what_the_move_explains_is_said_once() -> None:
    there = {
        "firmware": "uefi",
        "processors": "2",
        "disk a": "100 bytes",
        "disk b": "7 bytes",
        "network card 1": "52:54:00:00:00:01",
    }
    here = {"firmware": "bios", "processors": "4", "disk a": "4096 bytes", "network card 1": "52:54:00:00:00:02"}
    moved = (
        Difference(what="processors", source="2", here="4", why="target.cpu_count asks for it"),
        Difference(what="mac of network card 1", source="a", here="b", why="target.identity is new"),
    )
    found = [(one.item, one.grade) for one in compared({}, {}, moved, (there, here))]
    assert sorted(found) == [
        ("disk a", "expected"),
        ("disk b", "wrong"),
        ("firmware", "wrong"),
        ("mac of network card 1", "expected"),
        ("processors", "expected"),
    ]


def test_a_guest_is_settled_once_nothing_that_starts_late_is_missing() -> None:
    source = {"host name": "a", "service nginx.service": "runs", "service vmtoolsd.service": "runs", "user root": "0"}
    late = {"host name": "a", "service cron.service": "runs", "user other": "1"}
    assert not is_settled(compared(source, late, ()))
    assert is_settled(compared(source, {**late, "service nginx.service": "runs"}, ()))


@pytest.mark.parametrize(("source", "clone", "where"), [({}, SOURCE, "at its source"), (SOURCE, {}, "here")])
def test_one_who_says_nothing_is_one_row(source: dict[str, str], clone: dict[str, str], where: str) -> None:
    (row,) = compared(source, clone, ())
    assert (row.item, row.grade, where in row.reason) == ("what runs in it", "look", True)
    assert is_settled([row])


def test_a_platform_that_says_nothing_is_a_row_though_the_guest_here_was_not_asked() -> None:
    (row,) = compared({}, {}, (), is_expected=True)
    assert (row.item, row.source, row.clone, row.grade) == ("what runs in it", None, None, "look")
    assert "no agent and no tools report the guest at its source" in row.reason
    assert compared({}, {}, ()) == ()


WORDS = st.one_of(st.sampled_from([*SOURCE, "users"]), st.text(max_size=20))
FACTS = st.dictionaries(WORDS, st.one_of(st.sampled_from([*SOURCE.values()]), st.text(max_size=60)), max_size=8)


@given(FACTS, FACTS)
def test_same_is_what_is_equal(source: dict[str, str], clone: dict[str, str]) -> None:
    for one in compared(source, clone, ()):
        assert (one.grade == "same") is (one.source == one.clone)
        assert one.reason or one.grade == "same"
