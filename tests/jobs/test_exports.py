"""Exports outlive who asked for them, are found again, and end with their folder."""

import os
import resource
import signal
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from synvirt import exporter
from synvirt.blocks import DiskReader
from synvirt.disks import open_reader
from synvirt.disks.nbd.reader import NbdReader
from synvirt.disks.raw.files import RawReader
from synvirt.disks.specs import ImageSpec, RawSpec
from synvirt.errors import Cancelled, DiskReadFailed, HostPathRejected, Internal, MalformedArchive
from synvirt.jobs import exports as exports_module
from synvirt.jobs.activity import QUIET_S, WAIT_MOST_S, Activity, Noticed, Yielding
from synvirt.jobs.exporting import ACTIVITY, LIVES, LOCK
from synvirt.jobs.exports import ProcessExports, holder
from synvirt.sizes import MIB
from tests.drawn import drawn
from tests.needs import need, need_root
from tests.running.processes import until


def disk_content() -> bytes:
    return drawn(2 * MIB, zeros=MIB)


@pytest.fixture
def exports() -> Iterator[ProcessExports]:
    with tempfile.TemporaryDirectory(prefix="sv-") as root:
        found = ProcessExports(lambda: Path(root) / "instant")
        yield found
        found.end("job")


@pytest.fixture
def source(tmp_path: Path) -> RawSpec:
    path = tmp_path / "disk.raw"
    path.write_bytes(disk_content())
    return RawSpec(path=str(path))


def _read(exports: ProcessExports, number: int = 0) -> bytes:
    with closing(NbdReader(f"nbd+unix:///?socket={exports.folder('job')}/{number}")) as reader:
        content = bytearray(reader.size)
        reader.read_into(0, memoryview(content))
        return bytes(content)


def test_disks_are_served_by_one_process_until_they_are_ended(exports: ProcessExports, source: RawSpec) -> None:
    exports.serve("job", [source, RawSpec(path=source.path, offset=4096, length=8192)])
    process = holder(exports.folder("job"))
    assert process is not None
    exports.serve("job", [source])
    assert holder(exports.folder("job")) == process, "it is found again"
    assert (_read(exports), _read(exports, 1)) == (disk_content(), disk_content()[4096:12288])
    assert stat.S_IMODE((exports.folder("job") / LOCK).stat().st_mode) == 0o600, "who locks it would pass for the exporter"
    exports.end("job")
    assert not exports.folder("job").exists()
    until(lambda: not Path(f"/proc/{process}/exe").exists())
    exports.end("job")


def test_exports_without_a_name_are_not_ended(exports: ProcessExports, source: RawSpec) -> None:
    """Their folder would be the one of all exports."""
    exports.serve("job", [source])
    with pytest.raises(ValueError, match="name"):
        exports.end("")
    assert _read(exports) == disk_content()


def test_what_cannot_be_removed_is_not_taken_for_gone(exports: ProcessExports, source: RawSpec) -> None:
    """Its ledger entry stays, and it is tried again."""
    need_root("mount")
    exports.serve("job", [source])
    busy = exports.folder("job").with_name("busy")
    busy.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", busy], check=True)
    try:
        with pytest.raises(Internal, match="cannot be removed: Device or resource busy"):
            exports.end("job")
    finally:
        subprocess.run(["umount", busy], check=True)
    exports.end("job")
    assert not busy.parent.exists()


def test_qemus_user_reaches_the_sockets_of_any_user_and_umask(exports: ProcessExports, source: RawSpec) -> None:
    given: list[str] = []
    folder = exports.folder("job")
    own = ProcessExports(lambda: folder.parent.parent, give=lambda path: given.append(path.name))
    before = os.umask(0o077)
    try:
        own.serve("job", [source, source])
    finally:
        os.umask(before)
    assert given == ["0", "1"]
    assert all(one.stat().st_mode & stat.S_IXOTH for one in (folder.parent.parent, folder.parent, folder))
    process = holder(folder)
    own.serve("job", [source, source])
    assert given == ["0", "1"] * 2, "the service that started it may have ended before it gave anything"
    assert process is not None
    os.kill(process, signal.SIGKILL)
    until(lambda: holder(folder) is None)
    own.serve("job", [source, source])
    assert given == ["0", "1"] * 3


def test_one_that_opens_its_disks_still_is_waited_for(exports: ProcessExports, source: RawSpec) -> None:
    """Of a service that was killed; and where it then does not serve, another does."""
    folder = exports.folder("job")
    opening = _that_opens(folder)
    serving = threading.Thread(target=exports.serve, args=("job", [source]))
    serving.start()
    serving.join(0.5)
    assert serving.is_alive(), "what is not served yet is not said to be"
    opening.communicate(b"\n")
    serving.join(30)
    assert holder(folder) not in (None, opening.pid)
    assert _read(exports) == disk_content()


def test_one_that_never_opens_its_disks_is_ended(
    exports: ProcessExports, source: RawSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each later try would wait for it, and none would ever serve."""
    opening = _that_opens(exports.folder("job"))
    monkeypatch.setattr("synvirt.jobs.exports.SERVED_WITHIN_S", 0.1)
    with pytest.raises(DiskReadFailed, match="do not open within"):
        exports.serve("job", [source])
    opening.communicate(timeout=30)
    assert opening.returncode == -signal.SIGKILL
    monkeypatch.undo()
    exports.serve("job", [source])
    assert _read(exports) == disk_content()


def _that_opens(folder: Path) -> "subprocess.Popen[bytes]":
    """A process that has the lock of an exporter and serves nothing, until its input ends."""
    folder.mkdir(parents=True)
    lock = folder / LOCK
    lock.touch()
    holds = "import fcntl, sys; f = open(sys.argv[1], 'r+b'); fcntl.lockf(f, fcntl.LOCK_EX, 1, 0); sys.stdin.read()"
    opening = subprocess.Popen([sys.executable, "-c", holds, lock], stdin=subprocess.PIPE)
    until(lambda: holder(folder) == opening.pid)
    return opening


def test_one_that_serves_is_not_ended_as_one_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A guest may run on it: only the answer to who started it came too late."""
    ended: list[int] = []
    monkeypatch.setattr(exports_module, "_kill", ended.append)
    for serves, expected in ((7, []), (None, [7])):
        monkeypatch.setattr(exports_module, "holder", lambda _, byte=LIVES, serves=serves: 7 if byte == LIVES else serves)
        assert "do not open" in exports_module._too_late(tmp_path).detail
        assert ended == expected


def test_where_no_process_can_be_started_it_is_an_error_of_ours(
    exports: ProcessExports, source: RawSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who keeps a guest going expects those, and tries again."""

    def full(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "run", full)
        with pytest.raises(Internal, match="cannot be served: Resource temporarily unavailable"):
            exports.serve("job", [source])
    exports.serve("job", [source])
    assert _read(exports) == disk_content()


def test_it_is_nobodys_child_and_in_a_cage(exports: ProcessExports, source: RawSpec) -> None:
    exports.serve("job", [source])
    process = holder(exports.folder("job"))
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines() if ":\t" in line)
    assert int(status["PPid"]) != os.getpid()
    assert os.getsid(int(process or 0)) != os.getsid(0), "a Ctrl-C in the service's terminal is not for it"
    assert int(status["NoNewPrivs"]) == 1
    assert int(status["Seccomp"]) == 2
    if os.geteuid() == 0:
        assert status["Uid"].split()[1] != "0"


def test_one_that_was_killed_is_made_again(exports: ProcessExports, source: RawSpec) -> None:
    exports.serve("job", [source])
    first = holder(exports.folder("job"))
    assert first is not None
    os.kill(first, signal.SIGKILL)
    until(lambda: holder(exports.folder("job")) is None)
    exports.serve("job", [source])
    assert holder(exports.folder("job")) not in (None, first)
    assert _read(exports) == disk_content()


def test_one_that_cannot_be_read_is_made_anew_but_not_all_the_time(
    exports: ProcessExports, source: RawSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening what it serves may take as long as a guest waits for it."""
    exports.renew("job")
    exports.serve("job", [source])
    process = holder(exports.folder("job"))
    exports.renew("job")
    assert holder(exports.folder("job")) == process
    monkeypatch.setattr(exports_module, "RENEWED_AFTER_S", 0.0)
    exports.renew("job")
    assert holder(exports.folder("job")) is None
    exports.serve("job", [source])
    assert holder(exports.folder("job")) not in (None, process)
    assert _read(exports) == disk_content()


def test_it_ends_with_its_folder(exports: ProcessExports, source: RawSpec) -> None:
    exports.serve("job", [source])
    process = holder(exports.folder("job"))
    subprocess.run(["rm", "-r", str(exports.folder("job"))], check=True)
    until(lambda: not Path(f"/proc/{process}/exe").exists())


def test_only_its_removal_ends_it(tmp_path: Path) -> None:
    """A disk that does not answer for a moment takes no guest its disks."""
    lock, away = tmp_path / "lock", tmp_path / "away"
    lock.touch()
    own = lock.stat()
    away.symlink_to(away)  # stat(2) fails, and it is not missing
    assert [exporter._is(path, own) for path in (lock, away, tmp_path / "none", lock / "x")] == [True, True, False, False]
    new = tmp_path / "new"
    new.touch()
    new.replace(lock)
    assert not exporter._is(lock, own)


def test_it_outlives_who_asked_for_it(exports: ProcessExports, source: RawSpec) -> None:
    """The service is killed with all its threads, and its children's group is ended."""
    code = (
        "import os, signal, sys; from pathlib import Path; from synvirt.jobs.exports import ProcessExports; "
        "from synvirt.disks.specs import RawSpec; "
        "ProcessExports(lambda: Path(sys.argv[1])).serve('job', [RawSpec(path=sys.argv[2])]); os.kill(0, signal.SIGKILL)"
    )
    killed = subprocess.run(
        [sys.executable, "-c", code, str(exports.folder("job").parent.parent), source.path], start_new_session=True, check=False
    )
    assert killed.returncode == -signal.SIGKILL
    assert holder(exports.folder("job")) is not None
    assert _read(exports) == disk_content()


def test_what_cannot_be_served_is_reported(exports: ProcessExports, source: RawSpec, tmp_path: Path) -> None:
    with pytest.raises(DiskReadFailed):
        exports.serve("job", [RawSpec(path=str(tmp_path / "gone"))])
    with pytest.raises(MalformedArchive):
        exports.serve("job", [ImageSpec(format="qcow2", over=source, name="x.qcow2")])
    assert holder(exports.folder("job")) is None
    exports.serve("job", [source])
    assert _read(exports) == disk_content(), "what went wrong before leaves nothing in the way"


def test_it_reads_nothing_but_its_disks(exports: ProcessExports, source: RawSpec, tmp_path: Path) -> None:
    """A hostile image that names another file of the host's."""
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "base.raw").write_bytes(b"secret" * 1000)
    image = tmp_path / "images" / "x.qcow2"
    image.parent.mkdir()
    subprocess.run(
        ["qemu-img", "create", "-q", "-f", "qcow2", "-F", "raw", "-b", str(secret / "base.raw"), str(image), "1M"], check=True
    )
    with pytest.raises(HostPathRejected):
        exports.serve("job", [ImageSpec(format="qcow2", over=RawSpec(path=str(image)), root=str(image.parent), name="x.qcow2")])


# ── boot reads come first ────────────────────────────────────────────────────────────────────────────────────────────


class _Slow:
    """A reader whose reads end when the test lets them."""

    size, max_readers = MIB, 4

    def __init__(self) -> None:
        self.go_on = threading.Event()

    def read_into(self, offset: int, buffer: memoryview) -> None:
        assert self.go_on.wait(30)

    def extents(self) -> Iterator[None]:
        return iter(())

    def close(self) -> None:
        pass


def test_a_copy_waits_while_the_guest_reads_and_goes_on_after(tmp_path: Path) -> None:
    activity, slow = Activity(tmp_path / ACTIVITY), _Slow()
    reader: DiskReader = Noticed(slow, activity)  # type: ignore[arg-type]
    yielding = Yielding(tmp_path / ACTIVITY, lambda: False)
    yielding.take(1)  # nobody has read yet
    reading = threading.Thread(target=reader.read_into, args=(0, memoryview(bytearray(1))))
    reading.start()
    shared = tmp_path / ACTIVITY
    until(lambda: struct.unpack("=QQ", shared.read_bytes())[1] == 1)
    began = time.monotonic()
    yielding.take(1)
    assert time.monotonic() - began >= WAIT_MOST_S, "it goes on all the same in the end"
    slow.go_on.set()
    reading.join()
    yielding.take(1)
    assert time.monotonic_ns() - struct.unpack("=QQ", shared.read_bytes())[0] >= QUIET_S * 1e9
    reading_for_ever = Yielding(shared, lambda: True)
    with activity.reading(), pytest.raises(Cancelled):
        reading_for_ever.take(1)


def test_an_export_notes_what_is_read_of_it(exports: ProcessExports, source: RawSpec) -> None:
    exports.serve("job", [source])
    shared = exports.folder("job") / ACTIVITY
    assert shared.read_bytes() == bytes(16)
    _read(exports)
    at_ns, under_way = struct.unpack("=QQ", shared.read_bytes())
    assert at_ns <= time.monotonic_ns()
    assert at_ns > 0
    assert under_way == 0


def test_noticed_is_the_same_disk(tmp_path: Path, source: RawSpec) -> None:
    with closing(open_reader(source)) as plain, closing(Noticed(RawReader(source.path), Activity(tmp_path / "a"))) as noticed:
        assert (noticed.size, noticed.max_readers, list(noticed.extents())) == (
            plain.size,
            plain.max_readers,
            list(plain.extents()),
        )


def test_without_an_export_there_is_nothing_to_yield_to(tmp_path: Path) -> None:
    with pytest.raises(DiskReadFailed):
        Yielding(tmp_path / "gone", lambda: False)


def test_an_export_that_is_made_again_leaves_its_file_whole(tmp_path: Path) -> None:
    """It was cut off, and then written anew, which on a full disk it never was: a copy that had mapped it was killed."""
    shared = tmp_path / ACTIVITY
    Activity(shared)
    copy = Yielding(shared, lambda: False)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))  # no byte can be written
    try:
        Activity(shared)  # what a guest runs from is served all the same
        with pytest.raises(OSError, match="File too large"):
            Activity(tmp_path / "new")  # a copy would find nothing to look at
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert shared.stat().st_size == 16
    copy.take(1)


_READS_ON_A_FULL_DISK = """
import os, sys
from pathlib import Path
from synvirt.jobs.activity import Activity

folder = Path(sys.argv[1])
activity = Activity(folder / "activity")
os.sync()  # what is written to the file from now on has a new place on the disk
with (folder / "fill").open("wb", buffering=0) as file:
    for size in (1 << 20, 4096, 1):
        try:
            while True:
                file.write(os.urandom(size))
        except OSError:
            os.sync()
for _ in range(20):
    with activity.reading():
        os.sync()
"""


def test_a_full_disk_does_not_end_what_a_guest_runs_from(tmp_path: Path) -> None:
    """The note of the guest's reads was a mapped page, which Btrfs must give a new place: the exporter ended by SIGBUS, at the
    guest's next read, and so did each one that took its place."""
    need_root("mount")
    image, folder = tmp_path / "image", tmp_path / "mounted"
    with image.open("wb") as file:
        file.truncate(128 * MIB)
    folder.mkdir()
    subprocess.run([need("mkfs.btrfs", "btrfs-progs"), "-q", "-M", image], check=True)
    subprocess.run(["mount", "-o", "loop", image, folder], check=True)
    try:
        done = subprocess.run([sys.executable, "-P", "-c", _READS_ON_A_FULL_DISK, folder], check=False)
    finally:
        subprocess.run(["umount", folder], check=True)
    assert done.returncode == 0
