"""What is particular to volumes on zfs, on real zfs."""

import contextlib
import ctypes
import errno
import grp
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import UUID, uuid4

import pytest

from synvirt.backups.sources.made import Made
from synvirt.backups.sources.zfs_moment import Moment
from synvirt.backups.sources.zfs_stream import changed, send
from synvirt.destinations.zfs import BLOCK_BYTES, ZfsDestination
from synvirt.destinations.zfs_allow import NEEDED, missing
from synvirt.destinations.zfs_command import Zfs, ZfsRefused
from synvirt.disks import open_reader, open_writer
from synvirt.disks.raw import files as raw
from synvirt.disks.specs import BlockWriterSpec, written
from synvirt.errors import DiskWriteFailed
from synvirt.privileged import preparing
from tests.contracts.destinations import SIZE, read, write
from tests.guest.zvols import POOL, below, in_a_child, new_destination, prop, root, small_pool, used_bytes, volumes, zfs

MIB = 1 << 20


@pytest.fixture(scope="module")
def destination() -> ZfsDestination:
    """One for all: each has four datasets to make. Tests look at their own job's folder."""
    return new_destination()


@pytest.fixture
def volume(destination: ZfsDestination) -> str:
    name = destination.volume_name(uuid4(), "Hard disk 1")
    destination.create(name, SIZE)
    return name


def test_a_volume_is_as_the_specification_wants_it(destination: ZfsDestination) -> None:
    job = uuid4()
    name = destination.volume_name(job, "Hard disk 1")
    assert name.startswith(f"{root(destination)}/{job}/Hard_disk_1-")
    destination.create(name, 3 * MIB + 1)
    wanted = {
        "type": "volume",
        "volsize": str(3 * MIB + BLOCK_BYTES),
        "volblocksize": str(BLOCK_BYTES),
        "compression": "lz4",
        "refreservation": "0",
        "volmode": "dev",
        "synvirt:job": str(job),
        "synvirt:disk": name.rsplit("/", 1)[1],
        "synvirt:size": str(3 * MIB + 1),
    }
    properties = zfs("get", "-Hp", "-o", "property,value", ",".join(wanted), name).splitlines()
    assert dict(line.split("\t") for line in properties) == wanted
    assert prop(root(destination), "canmount") == "off"
    assert prop(name, "com.sun:auto-snapshot") == "false"


def test_discarded_zeros_give_their_room_back(destination: ZfsDestination) -> None:
    name = destination.volume_name(uuid4(), "disk")
    destination.create(name, 32 * MIB)
    write(destination, name, 32 * MIB, 0, os.urandom(16 * MIB))
    assert 16 * MIB <= used_bytes(name) < 18 * MIB
    writer = open_writer(destination.open(name, 32 * MIB))
    writer.zero(1000, 12 * MIB)
    writer.zero(20 * MIB, 12 * MIB)
    writer.flush()
    writer.close()
    assert 4 * MIB <= used_bytes(name) < 5 * MIB
    assert [read(destination, name, 1000, 12 * MIB) == bytes(12 * MIB)] == [True]  # any() takes a second here


def test_zeros_are_written_where_nothing_can_be_discarded(
    destination: ZfsDestination, volume: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the disk's end and no further; lz4 makes nothing of them again."""

    def refuse(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    for way in ("punch_hole", "discard", "zero_out"):
        monkeypatch.setattr(raw, way, refuse)
    writer = open_writer(destination.open(volume, SIZE))
    writer.write(0, memoryview(os.urandom(SIZE)))
    writer.flush()
    assert used_bytes(volume) > SIZE
    writer.zero(1000, SIZE - 1000)
    with pytest.raises(DiskWriteFailed, match="outside"):
        writer.zero(SIZE, 1)
    writer.flush()
    writer.close()
    assert not any(read(destination, volume, 1000, SIZE - 1000))
    assert used_bytes(volume) < 1 << 18


def test_a_full_pool_is_no_space_left(tmp_path: Path) -> None:
    with small_pool("small", tmp_path / "small"):
        destination = new_destination("small")
        assert destination.free_bytes() < 16 * MIB
        name = destination.volume_name(uuid4(), "disk")
        destination.create(name, 256 * MIB)
        with pytest.raises(DiskWriteFailed, match="No space left") as caught:
            write_until_full(destination, name, 256 * MIB)
        assert caught.value.hint
        destination.destroy(name)
        assert volumes(destination) == []


def test_a_quota_that_is_used_up_is_named() -> None:
    """Linux has no error of a device for it, so the volume's says «Input/output error», as a broken disk's."""
    dataset = f"{POOL}/limited-{uuid4().hex[:8]}"
    zfs("create", "-o", "canmount=off", "-o", "quota=24M", dataset)
    destination = ZfsDestination(POOL, dataset.removeprefix(f"{POOL}/"))
    name = destination.volume_name(uuid4(), "disk")
    destination.create(name, 64 * MIB)
    with pytest.raises(DiskWriteFailed, match="Input/output error") as caught:
        write_until_full(destination, name, 64 * MIB)
    assert "quota" in (caught.value.hint or "")
    destination.destroy(name)
    assert volumes(destination) == []


def write_until_full(destination: ZfsDestination, name: str, size: int) -> None:
    writer = open_writer(destination.open(name, size))
    try:
        for at in range(0, size, 4 * MIB):
            writer.write(at, memoryview(os.urandom(4 * MIB)))
            writer.flush()
    finally:
        writer.close()


# ── what is not ours ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_carries_no_mark_of_its_own_is_never_destroyed(destination: ZfsDestination, volume: str) -> None:
    """A mark that is inherited from the job's folder is none."""
    folder = volume.rsplit("/", 1)[0]
    other = f"{folder}/theirs"
    zfs("create", "-s", "-V", "1M", other)
    assert prop(other, "synvirt:job") == folder.rsplit("/", 1)[1]
    with pytest.raises(DiskWriteFailed, match="mark") as caught:
        destination.destroy(other)
    assert caught.value.hint
    with pytest.raises(DiskWriteFailed, match="mark"):
        destination.create(other, MIB)
    destination.destroy(volume)
    assert below(folder) == [folder, other]


def test_snapshots_and_clones_of_others_are_left_and_named(destination: ZfsDestination, volume: str) -> None:
    zfs("snapshot", f"{volume}@theirs")
    with pytest.raises(ZfsRefused, match="children") as caught:
        destination.destroy(volume)
    assert caught.value.reason == "in use"
    assert caught.value.hint
    zfs("clone", f"{volume}@theirs", f"{POOL}/clone-{uuid4()}")
    with pytest.raises(ZfsRefused) as caught:
        destination.destroy(volume)
    assert caught.value.reason == "in use"
    assert below(volume.rsplit("/", 1)[0])[-1] == f"{volume}@theirs"


def test_a_volume_in_use_is_asked_again_until_it_is_free(destination: ZfsDestination, volume: str) -> None:
    descriptor = os.open(destination.device(volume), os.O_RDONLY)
    threading.Timer(1.0, os.close, [descriptor]).start()
    destination.destroy(volume)
    assert below(volume.rsplit("/", 1)[0]) == []


def test_a_volume_in_use_for_good_is_busy() -> None:
    waited: list[float] = []
    destination = ZfsDestination(POOL, "busy", zfs=Zfs(sleep=waited.append))
    name = destination.volume_name(uuid4(), "disk")
    ZfsDestination(POOL, "busy").create(name, SIZE)  # which waits for its device
    descriptor = os.open(destination.device(name), os.O_RDONLY)
    with pytest.raises(ZfsRefused) as caught:
        destination.destroy(name)
    os.close(descriptor)
    assert caught.value.reason == "busy"
    assert sum(waited) > 10


# ── what can go wrong ────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_pool_that_is_not_there_is_named() -> None:
    destination = ZfsDestination("nopool", "synvirt")
    calls: tuple[Callable[[], object], ...] = (
        destination.free_bytes,
        lambda: destination.create(destination.volume_name(uuid4(), "disk"), SIZE),
    )
    for call in calls:
        with pytest.raises(DiskWriteFailed, match="nopool") as caught:
            call()
        assert caught.value.hint


def test_without_the_program_it_says_so() -> None:
    with pytest.raises(DiskWriteFailed, match="not installed"):
        ZfsDestination(POOL, "x", zfs=Zfs("no-such-zfs")).free_bytes()


def test_a_link_that_is_another_volumes_is_waited_out(destination: ZfsDestination, volume: str, tmp_path: Path) -> None:
    """A link that udev has not yet taken away, or not yet made: never write to another volume."""
    other = destination.volume_name(uuid4(), "other")
    stale = ZfsDestination(POOL, root(destination).split("/", 1)[1].rsplit("/", 1)[0], devices=tmp_path, link_timeout_s=1)
    link = tmp_path / other
    link.parent.mkdir(parents=True)
    link.symlink_to(Path(destination.device(volume)).resolve())
    with pytest.raises(DiskWriteFailed, match=volume):
        stale.create(other, SIZE)
    destination.create(other, SIZE)
    threading.Timer(0.3, _relink, [link, Path(destination.device(other)).resolve()]).start()
    stale.create(other, SIZE)


@pytest.mark.parametrize("as_root", [True, False])
def test_a_link_that_is_gone_is_asked_back(
    destination: ZfsDestination, volume: str, monkeypatch: pytest.MonkeyPatch, as_root: bool
) -> None:
    """udev takes a link away when it looks at a device and cannot open it at that moment."""
    link = Path(destination.device(volume))
    subprocess.run(["udevadm", "settle"], check=True)
    link.unlink()
    if not as_root:

        def refuse(path: Path, text: str) -> None:
            raise PermissionError(13, "Permission denied", str(path))

        monkeypatch.setattr(Path, "write_text", refuse)
    assert Path(destination.device(volume)) == link
    assert link.is_block_device()


def test_a_volume_is_opened_though_its_link_went_meanwhile(destination: ZfsDestination, volume: str) -> None:
    spec = destination.open(volume, SIZE)
    assert isinstance(spec, BlockWriterSpec)
    subprocess.run(["udevadm", "settle"], check=True)
    Path(spec.path).unlink()
    writer = open_writer(spec)
    writer.write(0, memoryview(b"mine".ljust(4096)))
    writer.flush()
    with contextlib.closing(open_reader(written(spec))) as reader:
        held = bytearray(4)
        reader.read_into(0, memoryview(held))
    writer.close()
    assert held == b"mine"


def _relink(link: Path, to: Path) -> None:
    link.unlink()
    link.symlink_to(to)


# ── not as root ──────────────────────────────────────────────────────────────────────────────────────────────────────

USER = 1000
# include/uapi/linux/prctl.h and capability.h
PR_SET_KEEPCAPS, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE = 8, 24, 38, 47, 2
CAP_DAC_OVERRIDE, CAPABILITY_VERSION = 1, 0x20080522


@pytest.fixture
def as_user() -> Iterator[Callable[[Callable[[], None]], str]]:
    """What is said by another user who does it, a member of the group that owns volumes, as docs/zfs.md says."""

    def run(does: Callable[[], None]) -> str:
        def become_and_do() -> None:
            os.setgroups([grp.getgrnam("disk").gr_gid])
            os.setgid(USER)
            os.setuid(USER)
            os.chdir("/")
            does()

        return in_a_child(become_and_do)

    yield run
    subprocess.run(["zfs", "unallow", "-r", POOL], check=False)


def test_a_user_who_is_allowed_does_all_of_it(as_user: Callable[[Callable[[], None]], str]) -> None:
    dataset, name = f"{POOL}/delegated", f"(unknown: {USER})"
    zfs("create", "-o", "canmount=off", dataset)
    zfs("allow", "-u", str(USER), ",".join(NEEDED - {"destroy"}), dataset)
    assert missing(f"{dataset}/below", name, frozenset()) == ["destroy"]
    zfs("allow", "-s", "@some", "destroy", dataset)
    zfs("allow", "-e", "@some", dataset)
    assert missing(dataset, name, frozenset()) == []

    def work() -> None:
        destination = ZfsDestination(POOL, "delegated")
        volume = destination.volume_name(UUID(int=9), "Hard disk 1")
        destination.create(volume, 3_000_001)
        write(destination, volume, 3_000_001, 0, b"mine")
        assert read(destination, volume, 0, 4) == b"mine"
        destination.free_bytes()
        destination.destroy(volume)
        sys.stdout.write(f"done by {os.getresuid()}")

    assert as_user(work) == f"done by {(USER,) * 3}"
    assert zfs("list", "-Hp", "-o", "name", "-r", dataset).split() == [dataset, f"{dataset}/migrations"]


def test_a_user_without_the_right_gets_an_error_that_names_it(as_user: Callable[[Callable[[], None]], str]) -> None:
    def work() -> None:
        destination = ZfsDestination(POOL, "forbidden")
        try:
            destination.create(destination.volume_name(UUID(int=9), "disk"), 3_000_001)
        except ZfsRefused as refused:
            sys.stdout.write(f"{refused.reason} {refused.hint}")

    message = as_user(work)
    assert message.startswith("permission `synvirt doctor`"), message


def become_the_service() -> None:
    """The package's: a user of its own, with the one of its capabilities that opens devices; and in no group. As setpriv(1)
    does it, which would begin a new Python."""
    libc = ctypes.CDLL(None, use_errno=True)
    for number in range(64):
        if number != CAP_DAC_OVERRIDE:
            libc.prctl(PR_CAPBSET_DROP, number, 0, 0, 0)  # the kernel knows fewer
    libc.prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0)
    os.setgroups([])
    os.setresgid(USER, USER, USER)
    os.setresuid(USER, USER, USER)
    one = 1 << CAP_DAC_OVERRIDE
    libc.capset((ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)(one, one, one, 0, 0, 0))
    libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, CAP_DAC_OVERRIDE, 0, 0)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    os.chdir("/")
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines())
    assert {int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {one}, status
    assert (status["NoNewPrivs"], status["Groups"].strip()) == ("1", "")
    assert os.getresuid() == os.getresgid() == (USER,) * 3


def prepare(config: Path) -> None:
    """As root does before the service starts."""
    sys.argv = ["synvirt-prepare", "--config", str(config), "--user", str(USER)]
    assert preparing.main() == 0


def test_what_root_prepares_is_all_that_volumes_backups_and_restores_ask_for(tmp_path: Path) -> None:
    """And nothing of it reaches what lies beside."""
    config = tmp_path / "synvirt.toml"
    config.write_text(f'[zfs]\npool = "{POOL}"\nnamespace = "prepared"\n')
    config.chmod(0o640)
    for _ in range(2):
        assert in_a_child(lambda: prepare(config)) == ""
    beside = f"{POOL}/beside"
    zfs("create", "-V", "1M", beside)
    assert in_a_child(work_as_the_service).split() == [*(["permission"] * 5), "done"]
    assert zfs("list", "-Hp", "-o", "name", beside).strip() == beside
    subprocess.run(["zfs", "unallow", "-r", POOL], check=False)
    zfs("destroy", beside)


def work_as_the_service() -> None:
    become_the_service()
    destination, zfs, size = ZfsDestination(POOL, "prepared"), Zfs(), 3_000_001
    name = destination.volume_name(UUID(int=9), "Hard disk 1")
    destination.create(name, size)
    write(destination, name, size, 0, b"mine")
    other = destination.volume_name(UUID(int=10), "Hard disk 1")
    destination.clone(name, other)
    assert read(destination, other, 0, 4) == b"mine"
    destination.unclone(name, other)

    def moment(number: int) -> Moment:
        made = Made(id=UUID(int=number), job_id=UUID(int=1), vm_id="x", way="zfs", name=f"synvirt-{number}", volumes=(name,))
        return Moment(made)

    first = moment(1)
    first.take()
    with Path(first.device(name)).open("rb") as device:
        assert device.read(4) == b"mine"
    guid = first.mark(name)
    first.end()
    write(destination, name, size, 0, b"next")
    second = moment(2)
    second.take()
    areas = changed(send(second.changed(name, first.name, guid, size)))
    assert [extent.start for extent in areas if not extent.zero] == [0]
    second.end()
    for one in (first, second):
        one.forget()
    zfs("snapshot", f"{name}@synvirt-restore")
    write(destination, name, size, 0, b"lost")
    zfs("rollback", f"{name}@synvirt-restore")
    zfs("destroy", f"{name}@synvirt-restore")
    assert read(destination, name, 0, 4) == b"next"
    destination.destroy(name)
    for refused in (
        ("destroy", f"{POOL}/beside"),
        ("snapshot", f"{POOL}/beside@mine"),
        ("create", "-V", "1M", f"{POOL}/mine"),
        ("allow", "-e", "destroy", POOL),
        ("set", "mountpoint=/etc", f"{POOL}/prepared"),
    ):
        with pytest.raises(ZfsRefused) as caught:
            zfs(*refused)
        sys.stdout.write(f"{caught.value.reason} ")
    sys.stdout.write("done")
