"""The zfs destination over a fake zfs: its laws, and what zfs may say. tests/real/test_zfs.py does the same on real zfs."""

from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import UUID, uuid4

import pytest

from synvirt.destinations import DestinationAway
from synvirt.destinations.zfs import ZfsDestination
from synvirt.destinations.zfs_command import REFUSALS, Zfs, ZfsRefused
from synvirt.errors import DiskWriteFailed
from synvirt.programs import ENDED_HINT
from tests.contracts.destinations import SIZE, DestinationCase, DestinationContract
from tests.fakes.zfs import FakeZfs
from tests.fakes.zfs_here import answered_here
from tests.needs import need, need_root


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakeZfs]:
    need_root("losetup")
    need("losetup", "mount")
    fake = FakeZfs(tmp_path / "zfs")
    yield fake
    fake.close()


def over(fake: FakeZfs, sleep: Callable[[float], None] = lambda _: None, **options: float) -> ZfsDestination:
    zfs = Zfs(fake.program, sleep=sleep)
    return ZfsDestination("tank", "synvirt", zfs=zfs, devices=fake.devices, name_of=fake.name_of, **options)


class TestDestination(DestinationContract):
    @pytest.fixture
    def case(self, fake: FakeZfs) -> Iterator[DestinationCase]:
        with answered_here():
            yield DestinationCase(destination=over(fake), another=lambda: over(fake), volumes=fake.volumes)


def test_what_carries_no_mark_of_its_own_is_never_destroyed(fake: FakeZfs) -> None:
    """On a host that anybody uses: tests/guest does the same on real zfs. What a job's folder has counts for no volume."""
    destination, job = over(fake), uuid4()
    mine, other = (destination.volume_name(job, label) for label in ("mine", "theirs"))
    destination.create(mine, SIZE)
    Zfs(fake.program)("create", "-s", "-V", "1048576", "-o", "volblocksize=65536", other)
    with pytest.raises(DiskWriteFailed, match="does not carry the mark"):
        destination.destroy(other)
    with pytest.raises(DiskWriteFailed, match="does not carry the mark"):
        destination.create(other, 1 << 20)
    destination.destroy(mine)  # and the folder stays, as it is not empty
    assert fake.volumes() == [other]


@answered_here()
def test_what_is_busy_is_asked_again(fake: FakeZfs) -> None:
    waited: list[float] = []
    destination = over(fake, waited.append)
    name = destination.volume_name(uuid4(), "disk")
    destination.create(name, SIZE)
    fake.busy(3)
    destination.destroy(name)
    assert len(waited) == 3
    assert fake.volumes() == []


@answered_here()
def test_a_volume_of_a_pool_that_is_not_imported_is_not_taken_for_gone(fake: FakeZfs) -> None:
    """Its watermarks and its ledger entry would go, and the volume would come back with its pool and stay."""
    destination = over(fake)
    name, clone = destination.volume_name(uuid4(), "disk"), destination.volume_name(uuid4(), "disk")
    destination.create(name, SIZE)
    fake.export()
    with pytest.raises(DestinationAway, match="this host has no zfs pool tank"):
        destination.is_there(name)
    with pytest.raises(DestinationAway, match="this host has no zfs pool tank"):
        destination.destroy(name)
    with pytest.raises(DiskWriteFailed, match="this host has no zfs pool tank"):
        destination.unclone(name, clone)
    fake.bring_back()
    assert destination.is_there(name)
    for _ in range(2):
        destination.destroy(name)
    assert not destination.is_there(name)
    assert fake.volumes() == []


def test_free_leaves_zfs_its_own_room(tmp_path: Path) -> None:
    fake = FakeZfs(tmp_path / "zfs", pools={"tank": 16 << 20})
    assert over(fake).free_bytes() == 15 << 20


@answered_here()
def test_a_link_that_never_comes_is_an_error_and_the_volume_can_be_destroyed(fake: FakeZfs) -> None:
    elsewhere = ZfsDestination("tank", "synvirt", zfs=Zfs(fake.program), devices=Path("/nowhere"), link_timeout_s=0.1)
    name = elsewhere.volume_name(uuid4(), "disk")
    with pytest.raises(DiskWriteFailed, match="/nowhere/tank/synvirt/migrations") as caught:
        elsewhere.create(name, SIZE)
    assert caught.value.hint
    elsewhere.destroy(name)
    assert fake.volumes() == []


def test_a_folder_that_is_not_ours_is_left_where_the_volume_goes(fake: FakeZfs) -> None:
    destination, job = over(fake), uuid4()
    for folder in ("tank/synvirt", "tank/synvirt/migrations", f"tank/synvirt/migrations/{job}"):
        Zfs(fake.program)("create", folder)
    name = destination.volume_name(job, "disk")
    destination.create(name, SIZE)
    destination.destroy(name)
    assert list(fake.datasets())[-1] == f"tank/synvirt/migrations/{job}"


# (what zfs says, why it refuses)
SAID = [
    ("cannot open 'nopool': no such pool", "no pool"),
    ("cannot create 'tank/x': dataset already exists", "exists"),
    ("cannot create 'tank/x': out of space", "no space"),
    ("cannot create 'tank/x': quota exceeded", "no space"),
    ("cannot create 'tank/x': permission denied", "permission"),
    ("Permission denied the ZFS utilities must be run as root.", "permission"),
    ("cannot destroy 'tank/x': volume has children\nuse '-r' to destroy the following datasets:\ntank/x@busy", "in use"),
    ("cannot destroy 'tank/x@s': snapshot has dependent clones", "in use"),
    ("cannot rollback to 'tank/x@s': more recent snapshots or bookmarks exist\nuse '-r' to force deletion", "newer"),
    ("cannot create 'tank/x': something new", "other"),
    ("", "other"),
]


@pytest.mark.parametrize(("stderr", "reason"), SAID)
def test_every_refusal_has_a_reason_and_the_words_of_zfs(tmp_path: Path, stderr: str, reason: str) -> None:
    program = tmp_path / "zfs"
    program.write_text(f"#!/bin/sh\ncat >&2 <<'END'\n{stderr}\nEND\nexit 1\n")
    program.chmod(0o755)
    with pytest.raises(ZfsRefused) as caught:
        Zfs(str(program))("create", "tank/x")
    assert caught.value.reason == reason
    assert caught.value.code == "E_MIG_DISK_WRITE_FAILED"
    assert stderr.partition("\n")[0] in caught.value.detail
    assert (caught.value.hint is None) == (reason in ("other", "missing", "exists"))


AWAY = (
    "cannot open 'tank/x': pool I/O is currently suspended",
    "The ZFS modules are not loaded.\nTry running '/sbin/modprobe zfs' as root to load them.",
)


@pytest.mark.parametrize("stderr", AWAY)
def test_a_pool_that_comes_back_with_all_that_is_in_it_is_away(tmp_path: Path, stderr: str) -> None:
    program = tmp_path / "zfs"
    program.write_text(f"#!/bin/sh\ncat >&2 <<'END'\n{stderr}\nEND\nexit 1\n")
    program.chmod(0o755)
    with pytest.raises(DestinationAway) as caught:
        Zfs(str(program))("create", "tank/x")
    assert stderr.partition("\n")[0] in caught.value.detail
    assert caught.value.hint


def test_a_zfs_that_something_else_ended_is_named(tmp_path: Path) -> None:
    program = tmp_path / "zfs"
    program.write_text("#!/bin/sh\nkill -9 $$\n")
    program.chmod(0o755)
    with pytest.raises(ZfsRefused, match=r"^zfs was ended by SIGKILL$") as caught:
        Zfs(str(program))("list")
    assert (caught.value.reason, caught.value.hint) == ("other", ENDED_HINT)


def test_a_pool_that_does_not_answer_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("synvirt.destinations.zfs_command.TIMEOUT_S", 0.2)
    program = tmp_path / "zfs"
    program.write_text("#!/bin/sh\nsleep 60\n")
    program.chmod(0o755)
    with pytest.raises(DestinationAway, match="did not answer") as caught:
        Zfs(str(program))("list")
    assert caught.value.hint


def test_every_reason_but_three_has_its_test() -> None:
    assert {reason for _, reason, _ in REFUSALS} - {reason for _, reason in SAID} == {"missing", "busy", "away"}


@pytest.mark.parametrize(
    ("pool", "namespace"),
    [("", "x"), ("1tank", "x"), ("tank", ""), ("tank", "../x"), ("tank", "a b"), ("a/b", "x"), ("t", "n" * 120)],
)
def test_names_that_make_no_dataset_are_refused_at_once(pool: str, namespace: str) -> None:
    with pytest.raises(DiskWriteFailed, match="not form the name of a dataset") as caught:
        ZfsDestination(pool, namespace)
    assert caught.value.hint


def test_the_name_is_the_specifications() -> None:
    job = UUID(int=5)
    assert ZfsDestination("tank", "vms/synvirt").volume_name(job, "disk-0") == f"tank/vms/synvirt/migrations/{job}/disk-0"
