"""What is noted of a Hyper-V VM, and what is read by it: only what is surely ours, and only changes that are surely all."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from synvirt.errors import CbtReset
from synvirt.live.hyperv import journal, tracking
from synvirt.live.hyperv.journal import Entry

VM, SINCE = "vm-1", "synvirt-job-1"
ONE, TWO = {"id": "{AA}", "path": "a.vhdx", "size": 1000}, {"id": "{BB}", "path": "b.vhdx", "size": 1000}


def test_of_two_that_came_since_neither_is_ours() -> None:
    assert journal.only_new(["old", "new"], ["old"]) == "new"
    assert journal.only_new(["old", "new", "another"], ["old"]) is None
    assert journal.only_new(["old"], ["old"]) is None


def test_snapshots_are_of_one_job_where_only_their_numbers_differ() -> None:
    assert journal.same_job("synvirt-a-b-1", "synvirt-a-b-12")
    assert not journal.same_job("synvirt-a-b-1", "synvirt-a-c-1")


def state_of(entry: Entry, disks: list[str], trackings: list[str], chains: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "notes": journal.written("", {SINCE: entry}),
        "points": [{"id": "point", "type": 1, "disks": disks, "trackings": trackings}],
        "drives": [drive_of(one) for one in chains],
    }


def drive_of(top: dict[str, Any]) -> dict[str, Any]:
    return {"controller": "scsi", "number": 0, "location": 0, "chain": [top]}


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """All drives can be tracked, and are called by their files."""
    names = SimpleNamespace(key_of=lambda drive: drive["chain"][0]["path"], untracked_disk=lambda _: None)
    monkeypatch.setattr(tracking, "machines", names)


def test_a_disk_is_found_by_its_own_identifier() -> None:
    state = state_of(Entry(p="point"), ["x{bb}", "x{aa}"], ["of-b", "of-a"], [ONE, TWO])
    assert tracking._tracking_id(VM, state, drive_of(ONE), SINCE) == "of-a"
    assert tracking._tracking_id(VM, state, drive_of(TWO), SINCE) == "of-b"


@pytest.mark.parametrize(
    ("entry", "disks", "trackings", "chains"),
    [
        (Entry(p="point", sure=False), ["x{aa}"], ["of-a"], [ONE]),
        (Entry(p="another"), ["x{aa}"], ["of-a"], [ONE]),
        (Entry(p="point"), ["x{aa}", "y{aa}"], ["of-a", "of-a-too"], [ONE]),
        (Entry(p="point"), ["x", "y"], ["of-a", "of-b"], [ONE | {"id": ""}, TWO]),
        (Entry(p="point"), ["x"], ["of-x"], [ONE | {"id": ""}, TWO]),
        (Entry(p="point"), ["x{aa}"], [""], [ONE]),
    ],
    ids=["found later", "removed", "two of it", "without an identifier", "one id for two disks", "without a tracking id"],
)
def test_where_it_is_not_certain_the_whole_disk_is_compared(
    entry: Entry, disks: list[str], trackings: list[str], chains: list[dict[str, Any]]
) -> None:
    with pytest.raises(CbtReset):
        tracking._tracking_id(VM, state_of(entry, disks, trackings, chains), drive_of(chains[0]), SINCE)


@pytest.mark.parametrize("processed", [0, 1001, None])
def test_a_list_of_changes_that_does_not_go_on_is_none(processed: int | None) -> None:
    state = state_of(Entry(p="point"), ["x{aa}"], ["of-a"], [ONE])
    answers: Iterator[dict[str, Any]] = iter(
        [{"processed": 600, "offsets": [0, 990], "lengths": [10, 500]}, {"processed": processed}]
    )
    host: Any = SimpleNamespace(run=lambda *_, **__: {"offsets": (), "lengths": (), **next(answers)})
    with pytest.raises(CbtReset, match="after 600 of 1000"):
        tracking.areas(host, VM, state, drive_of(ONE), SINCE)


def test_changes_are_asked_for_to_the_disks_end_and_end_there() -> None:
    state = state_of(Entry(p="point"), ["x{aa}"], ["of-a"], [ONE])
    asked: list[tuple[int, int]] = []

    def run(_: str, **question: Any) -> dict[str, Any]:
        asked.append((question["Offset"], question["Length"]))
        return {"processed": 600 if len(asked) == 1 else 400, "offsets": [990] if len(asked) == 2 else [5], "lengths": [500]}

    host: Any = SimpleNamespace(run=run)
    assert tracking.areas(host, VM, state, drive_of(ONE), SINCE) == ((5, 500), (990, 10))
    assert asked == [(0, 1000), (600, 400)]
