"""What a moment of zfs volumes asks of zfs, and leaves where their pool is away. On real zfs: tests/guest/zfs_backups.py."""

from uuid import uuid4

import pytest

from synvirt.backups.sources.made import Made
from synvirt.backups.sources.zfs_moment import PROPERTY, Moment
from synvirt.destinations.zfs_command import Reason, Zfs, ZfsRefused

VOLUMES = ("tank/a/one", "tank/a/two")
MADE = Made(id=uuid4(), job_id=uuid4(), vm_id="guest", way="zfs", name="synvirt-x", volumes=VOLUMES)
CLONES = tuple(f"tank/a/{MADE.name}-{number}" for number in range(len(VOLUMES)))
SNAPSHOTS, BOOKMARKS = (tuple(f"{volume}{sign}{MADE.name}" for volume in VOLUMES) for sign in "@#")


class Pool(Zfs):
    """Answers from `marks`: each name that there is, with its own property. Like zfs, it refuses a list with one that is
    missing, and calls all missing while the pool is away."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.marks = dict.fromkeys(("tank", *VOLUMES), "") | dict.fromkeys(names, str(MADE.id))
        self.away, self.calls = False, list[str]()

    def __call__(self, *arguments: str) -> str:
        verb, names = arguments[0], [one for one in arguments[1:] if one.startswith("tank")]
        self.calls.append(verb)
        if self.away or not {*names} <= {*self.marks}:
            reason: Reason = "missing"
            raise ZfsRefused("zfs: dataset does not exist", reason, None)
        if verb == "destroy":
            for name in names:
                del self.marks[name]
        if verb == "get":
            assert PROPERTY in arguments
            return "".join(f"{name}\t{self.marks[name]}\tlocal\n" for name in reversed(names))
        return "".join(f"{name}\n" for name in names)


def left(pool: Pool) -> set[str]:
    return {*pool.marks} - {"tank", *VOLUMES}


def test_a_run_looks_once_for_what_it_made_and_later_forgets_its_bookmarks_alone() -> None:
    pool = Pool(*CLONES, *SNAPSHOTS, *BOOKMARKS)
    Moment(MADE, zfs=pool).end()
    assert left(pool) == {*BOOKMARKS}
    assert pool.calls == ["get", *["destroy"] * 4]
    pool.calls.clear()
    Moment(MADE.model_copy(update={"state": "lasting"}), zfs=pool).forget()
    assert left(pool) == set()
    assert pool.calls == ["destroy"] * 2


def test_what_a_killed_service_had_not_yet_made_is_passed_over_and_what_others_made_is_left() -> None:
    pool = Pool(CLONES[1], *SNAPSHOTS, BOOKMARKS[0])
    pool.marks[SNAPSHOTS[0]] = "theirs"
    Moment(MADE, zfs=pool).forget()
    assert left(pool) == {SNAPSHOTS[0]}


@pytest.mark.parametrize("state", ["working", "keeping", "lasting"])
def test_nothing_is_forgotten_while_the_pool_is_away(state: str) -> None:
    pool = Pool(*BOOKMARKS)
    pool.away = True
    with pytest.raises(ZfsRefused):
        Moment(MADE.model_copy(update={"state": state}), zfs=pool).forget()
