"""Files are looked into by a child of their own, in a cage: it answers as a reader here would, and misbehaving helps nobody."""

import errno
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from synvirt.cage import Network, layers
from synvirt.disks.roots import Root
from synvirt.disks.specs import ChecksumSpec, ImageSpec, NbdSpec, QemuSpec, RawSpec
from synvirt.errors import (
    BadRequest,
    DiskReadFailed,
    HostPathRejected,
    Internal,
    MalformedArchive,
    NotFound,
    SynvirtError,
    UnsupportedFormat,
)
from synvirt.jobs.inspecting import looker
from synvirt.jobs.inspecting.look import Look
from synvirt.jobs.inspecting.looking import LOOKER, TRIES, CagedLooking, Looking, vouch
from synvirt.model.kinds import OfflineKind
from synvirt.offline import browsing
from synvirt.offline.registry import detect
from synvirt.offline.several import choosing
from synvirt.remote import Remote
from tests.jobs.misbehaving import looker_that_does, misbehaviour
from tests.offline import appliances
from tests.running.processes import until


@pytest.fixture
def imports(tmp_path: Path) -> Path:
    folder = tmp_path / "imports"
    folder.mkdir()
    appliances.archive(folder / "web.ova", appliances.appliance("qemu_user"))
    (folder / "notes.txt").write_text("no machine")
    (folder / os.fsdecode(b"caf\xe9.txt")).write_text("not UTF-8")
    (folder / "inner").mkdir()
    return folder


def page(looking: Looking, imports: Path, limit: int = 10, cursor: str | None = None) -> str:
    """As a caller sees it: times have milliseconds."""
    return looking.browse(imports, limit=limit, cursor=cursor).model_dump_json()


def test_it_answers_as_a_reader_here_does(looking: CagedLooking, imports: Path) -> None:
    assert page(looking, imports) == page(browsing, imports)
    cursor = looking.browse(imports, limit=2).next_cursor
    assert page(looking, imports, 2, cursor) == page(browsing, imports, 2, cursor)
    found = looking.inspect(imports, "web.ova", free_bytes=lambda: 1)
    assert found == browsing.inspect(imports, "web.ova", free_bytes=lambda: 1)
    importer = looking.detect("web.ova", imports)
    assert importer.kind is OfflineKind.OVA_ARCHIVE
    path, [disk, *_] = imports / "web.ova", found.manifest.disks
    assert importer.inspect(path, imports).disks == found.manifest.disks
    own = detect("web.ova", imports).open_disk(path, imports, disk.key)
    assert importer.open_disk(path, imports, disk.key) == own


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("nosuch.ova", NotFound),
        ("../../etc/passwd", HostPathRejected),
        ("/etc/passwd", HostPathRejected),
        ("notes.txt", UnsupportedFormat),
        (os.fsdecode(b"caf\xe9.txt"), UnsupportedFormat),
    ],
)
def test_it_fails_as_a_reader_here_does(looking: CagedLooking, imports: Path, path: str, error: type[SynvirtError]) -> None:
    with pytest.raises(error) as caged:
        looking.inspect(imports, path)
    with pytest.raises(error) as here:
        browsing.inspect(imports, path)
    assert (caged.value.detail, caged.value.hint) == (here.value.detail, here.value.hint)


def test_of_several_machines_one_is_named(looking: CagedLooking, imports: Path) -> None:
    with pytest.raises(BadRequest, match="holds one VM"):
        choosing(looking.importers[OfflineKind.QCOW2], "web")
    assert choosing(looking.importers[OfflineKind.OVA_ARCHIVE], "web") != looking.importers[OfflineKind.OVA_ARCHIVE]


# ── readers that misbehave on purpose ────────────────────────────────────────────────────────────────────────────────

MISBEHAVIOUR = misbehaviour(MalformedArchive) | {
    "reads another's file": ("os.listdir('/root')", Internal, "PermissionError"),
    "writes the file that it reads": ("open(str(look.root) + '/web.ova', 'r+')", Internal, "PermissionError"),
}


@pytest.fixture(scope="module")
def bad() -> Iterator[CagedLooking]:
    made = CagedLooking(looker_that_does("look.vm"))
    yield made
    made.close()


@pytest.mark.parametrize("name", MISBEHAVIOUR)
def test_what_misbehaves_fails_and_the_next_look_is_served(bad: CagedLooking, imports: Path, name: str) -> None:
    missing = [layer for layer, there in layers().items() if not there]
    assert not missing, f"this host lacks {missing}"
    does, error, message = MISBEHAVIOUR[name]
    with pytest.raises(error, match=message) as failed:
        bad.inspect(imports, "web.ova", vm=does)
    assert failed.value.code.startswith("E_MIG_")
    with pytest.raises(UnsupportedFormat):
        bad.inspect(imports, "notes.txt")


@pytest.mark.parametrize("answer", ["[]", '{"offline_kind": "qcow2"}', "1", '{"manifest": {}}'])
def test_what_is_no_answer_is_not_believed(bad: CagedLooking, imports: Path, answer: str) -> None:
    with pytest.raises(Internal, match="no reader gives"):
        bad.inspect(imports, "web.ova", vm=repr(answer))


def test_one_that_hangs_is_ended_in_time(bad: CagedLooking, imports: Path) -> None:
    with pytest.raises(DiskReadFailed, match="could not be inspected"):
        bad.ask(Look("inspect", imports, "web.ova", within_s=-4.5, vm="time.sleep(1000)"))


_WITHOUT_ROOM = """
import os, sys, tempfile
from synvirt.jobs.inspecting import looker
lacks = sys.argv.pop(1)
def refused(*_):
    raise BlockingIOError(11, os.strerror(11))
if lacks == "a folder":
    tempfile.tempdir = "/proc/self"  # takes no folder
else:
    setattr(os, lacks, refused)
looker.main()
"""


@pytest.mark.parametrize("lacks", ["a folder", "fork", "pidfd_open"])
def test_a_child_that_cannot_begin_is_said_to_be_that_and_ends_no_other(imports: Path, lacks: str) -> None:
    """The looker ended, with all inspections under way, and of each it was only said that it does not run."""
    wanted = Look("inspect", imports, "web.ova", within_s=60, programs=lacks == "a folder")
    bad = CagedLooking(("-P", "-c", _WITHOUT_ROOM, lacks))
    try:
        bad.begin()
        with pytest.raises(Internal, match=r"web\.ova cannot be inspected now: (No such file|Resource temporarily)") as failed:
            bad.ask(wanted)
        assert "TasksMax" in str(failed.value.hint)
        assert bad._started is not None
        assert not bad._started.is_gone()
    finally:
        bad.close()


@pytest.mark.parametrize("wanting", ["socketpair", "Popen"])
def test_a_service_that_lacks_descriptors_or_processes_says_so(
    imports: Path, monkeypatch: pytest.MonkeyPatch, wanting: str
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    looking = CagedLooking()
    monkeypatch.setattr(socket if wanting == "socketpair" else subprocess, wanting, refused)
    with pytest.raises(Internal, match="cannot be inspected now: Too many open files"):
        looking.inspect(imports, "web.ova")
    monkeypatch.undo()
    looking.close()


def test_a_host_that_does_not_confine_a_child_is_not_the_file_s_fault(imports: Path) -> None:
    cannot = (
        "import errno\nfrom synvirt.jobs.inspecting import looker\ndef no(_):\n    raise OSError(errno.ENOMEM, 'Landlock')\n"
    )
    bad = CagedLooking(("-P", "-c", f"{cannot}looker.enter = no\nlooker.main()"))
    try:
        with pytest.raises(Internal, match="not confined: Landlock"):
            bad.inspect(imports, "web.ova")
    finally:
        bad.close()


def test_a_child_has_nothing_open_but_its_own(bad: CagedLooking, imports: Path) -> None:
    """The looker's control socket would let it ask for children without a cage."""
    does = "'[' + ','.join(str(n) for n in range(3, 100) if os.path.exists(f'/proc/self/fd/{n}')) + ']'"
    assert len(bad.ask(Look("inspect", imports, "web.ova", within_s=60, vm=does))) == 1


def test_a_looker_that_was_ended_is_started_again(looking: CagedLooking, imports: Path) -> None:
    looking.browse(imports, limit=1)
    first = looking._started
    assert first is not None
    os.kill(first._child.pid, signal.SIGKILL)
    first._child.wait()
    assert page(looking, imports) == page(browsing, imports)
    assert looking._started is not first


WAITS = "None if os.path.exists(f'{look.root}/go on') else 'time.sleep(60)'"


def children(looking: CagedLooking) -> list[int]:
    """The child of the question under way."""
    assert looking._started is not None
    pid = looking._started._child.pid
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def end_child(looking: CagedLooking, *, and_looker: bool = False) -> None:
    """As the kernel does where memory is short."""
    assert looking._started is not None
    [child] = children(looking)
    for one in (*([looking._started._child.pid] if and_looker else []), child):
        os.kill(one, signal.SIGKILL)
    until(lambda: not Path(f"/proc/{child}").exists(), 60)


@pytest.mark.parametrize("and_looker", [False, True], ids=["its child", "the looker too"])
def test_a_file_is_not_to_blame_for_what_something_else_ended(imports: Path, and_looker: bool) -> None:
    """It was an attack that is to be reported, and the manifest of a restore point was damaged."""
    with closing(CagedLooking(looker_that_does(WAITS))) as looking, ThreadPoolExecutor(1) as pool:
        looking._looker_now()
        found = pool.submit(looking.inspect, imports, "web.ova")
        until(lambda: children(looking) != [], 60)
        (imports / "go on").touch()
        end_child(looking, and_looker=and_looker)
        assert found.result(60) == browsing.inspect(imports, "web.ova")


def test_a_file_whose_reader_something_else_ends_each_time(imports: Path) -> None:
    with closing(CagedLooking(looker_that_does(WAITS))) as looking, ThreadPoolExecutor(1) as pool:
        looking._looker_now()
        found = pool.submit(looking.inspect, imports, "web.ova")
        for _ in range(TRIES):
            until(lambda: children(looking) != [], 60)
            end_child(looking)
        with pytest.raises(Internal, match=r"web\.ova was not inspected: what reads it was ended by SIGKILL") as failed:
            found.result(60)
    assert "journalctl" in str(failed.value.hint)


@pytest.mark.parametrize("when", ["before it is ready", "before that is read"])
def test_a_looker_whose_service_ends_as_it_begins_ends_without_a_word(when: str) -> None:
    """After SIGTERM to a service that begins, a traceback of the looker stood in its log."""
    ours, its = socket.socketpair()
    argv = [sys.executable, *LOOKER, str(its.fileno())]
    with ours, subprocess.Popen(argv, pass_fds=[its.fileno()], stderr=subprocess.PIPE, text=True) as child:
        its.close()
        if when == "before that is read":
            select.select([ours], [], [], 60)
        ours.close()
        _, said = child.communicate(timeout=60)
    assert (child.returncode, said) == (0, "")


# ── what a reader that was taken over may name ───────────────────────────────────────────────────────────────────────

ELSEWHERE = Remote(url="https://nas.example/a/", credentials=(("token", "x"),))


@pytest.mark.parametrize(
    ("spec", "root"),
    [
        (RawSpec(path="/etc/shadow"), Path("/imports")),
        (RawSpec(path="etc/shadow"), Path("/imports")),
        (RawSpec(path="/imports/../etc/shadow"), Path("/imports")),
        (RawSpec(path="/imports2/a"), Path("/imports")),
        (ImageSpec(format="vmdk", over=RawSpec(path="/imports/a"), root="/"), Path("/imports")),
        (ImageSpec(format="vdi", over=RawSpec(path="/imports/a"), parent=RawSpec(path="/dev/sda")), Path("/imports")),
        (QemuSpec(driver="qcow2", path="/imports/a", key_file="/etc/shadow"), Path("/imports")),
        (NbdSpec(uri="nbd://192.0.2.1/x"), Path("/imports")),
        (RawSpec(path="a", remote=ELSEWHERE), Path("/imports")),
        (RawSpec(path="/etc/shadow"), ELSEWHERE),
        (RawSpec(path="a", remote=Remote(url="https://other.example/")), ELSEWHERE),
        (RawSpec(path="etc/shadow"), ELSEWHERE),
        (RawSpec(path="../b/secret", remote=ELSEWHERE), ELSEWHERE),
        (ChecksumSpec(path="/etc/shadow", length=1, algorithm="sha256", expected="0", name="a"), Path("/imports")),
    ],
)
def test_files_beyond_the_root_are_not_believed(spec: object, root: Root) -> None:
    with pytest.raises(Internal, match="no reader gives"):
        vouch(spec, root)


def test_files_under_the_root_are() -> None:
    vouch(ImageSpec(format="vmdk", over=RawSpec(path="/imports/a"), root="/imports", name="a"), Path("/imports"))
    vouch(RawSpec(path="a/b", remote=ELSEWHERE), ELSEWHERE)


def test_an_order_is_what_was_asked(tmp_path: Path) -> None:
    for root in (tmp_path, ELSEWHERE, None):
        look = Look("detect", root, os.fsdecode(b"caf\xe9"), 1.5, vm="a", limit=3, contents=(b"a\n", b"", b"\n"))
        assert Look.read(look.order()) == look


def test_the_cage_of_a_look(tmp_path: Path) -> None:
    here = looker.cage_of(Look("detect", tmp_path, "a", 1), None)
    assert (set(here.reads), here.writes, here.network, here.programs) == ({str(tmp_path)}, (), Network.NONE, False)
    there = looker.cage_of(Look("detect", ELSEWHERE, "a", 1), None)
    assert (there.reads, there.writes, there.network) == ((), (), Network.ELSEWHERE)
