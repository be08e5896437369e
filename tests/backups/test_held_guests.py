"""What a run holds at a guest ends with the run, also where the store, the hypervisor or the repository does not answer."""

import asyncio
import errno
import os
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest

from synvirt.backups.orders import ServeOrder
from synvirt.backups.sources import bitmap
from synvirt.backups.sources.guest import SNAPSHOTS_LEFT_OUT, Ask, Keeping, Sources
from synvirt.backups.sources.made import Made
from synvirt.backups.working import Working
from synvirt.disks.specs import ImageSpec, RawSpec
from synvirt.errors import BackupInternal, Cancelled, Internal, PersistFailed, SourceSnapshotFailed
from synvirt.jobs.process import Ended
from synvirt.live.libvirt import backup as jobs
from synvirt.live.libvirt.manifest import parse
from synvirt.programs import run
from synvirt.repository.manifest import Mark, Named
from synvirt.repository.specs import FolderSpec, RepositorySpec
from tests.backups.house import House
from tests.running.processes import until


class Away:
    """A ledger whose store is away from the second write on."""

    def __init__(self) -> None:
        self.entries: list[Made] = []

    def all(self) -> list[Made]:
        return []

    def put(self, made: Made) -> None:
        if self.entries:
            raise PersistFailed("the store failed")
        self.entries.append(made)

    def strike(self, _made: Made) -> None:
        raise PersistFailed("the store failed")


class Way:
    def __init__(self) -> None:
        self.swept: list[str] = []

    def sweep(self, made: Made) -> None:
        self.swept.append(made.name)


def test_a_failed_run_lets_go_of_its_guest_though_the_store_is_away_and_says_why_it_failed() -> None:
    """The guest's backup job went on, and the run's error was the store's."""
    ledger, way = Away(), Way()
    made = Made(id=uuid4(), job_id=uuid4(), vm_id="v", way="bitmap", name="one")
    with pytest.raises(Cancelled), Keeping(ledger, way, made):  # type: ignore[arg-type]
        raise Cancelled
    assert way.swept == ["one"]


class Held:
    """A domain with snapshots, and its host."""

    def __init__(self, *snapshots: str) -> None:
        self.snapshots = snapshots

    def use(self) -> "Held":
        return self

    def lookupByName(self, _name: str) -> "Held":  # noqa: N802 - libvirt's names
        return self

    def UUIDString(self) -> str:  # noqa: N802
        return "v"

    def name(self) -> str:
        return "web"

    def listAllSnapshots(self, _flags: int) -> list[Any]:  # noqa: N802
        return [SimpleNamespace(getName=lambda name=name: name) for name in self.snapshots]


class AnyGuest:
    name = "scan"

    def fits(self, _domain: Any) -> None:
        return None

    @contextmanager
    def open(self, _domain: Any, _ask: Ask) -> Iterator[None]:
        yield


@pytest.mark.parametrize(
    ("snapshots", "reported"),
    [
        ((), []),
        (("before",), [(SNAPSHOTS_LEFT_OUT, "web has 1 snapshot, not backed up: before")]),
        (("a", "b"), [(SNAPSHOTS_LEFT_OUT, "web has 2 snapshots, not backed up: a, b")]),
    ],
)
def test_a_run_warns_that_the_snapshots_of_a_guest_are_not_backed_up(
    snapshots: tuple[str, ...], reported: list[tuple[str, str]]
) -> None:
    warned: list[tuple[str, str]] = []
    ask = Ask(
        vm_id="web",
        job_id=uuid4(),
        quiesce="off",
        base=lambda _: None,
        move=lambda _: None,
        warn=lambda code, message: warned.append((code, message)),
        stop=lambda: False,
    )
    sources = Sources(Held(*snapshots), Away(), (AnyGuest(),))  # type: ignore[arg-type]
    with sources.open(ask):
        assert warned == reported


def test_a_run_warns_of_snapshots_that_only_an_image_knows(house: House) -> None:
    path = house.folder / "images/web"
    run(["qemu-img", "create", "-q", "-f", "qcow2", str(path), "1M"], timeout_s=60)
    run(["qemu-img", "snapshot", "-c", "before", str(path)], timeout_s=60)
    house.guests.reader = lambda path: ImageSpec(format="qcow2", over=RawSpec(path=path), name="web")
    ended = house.run(house.job("web"))
    assert ended.status == "completed"
    assert [(one.code, one.vm_id, one.message) for one in ended.warnings] == [
        ("E_BAK_SNAPSHOTS_LEFT_OUT", "id-of-web", "the image of disk vda of web has 1 snapshot, not backed up")
    ]


def test_a_job_that_fills_its_folder_is_ended_again_until_it_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was ended once. Where libvirt did not do it then, the guest was paused as the folder was full."""
    monkeypatch.setattr(bitmap, "LOOK_EVERY_S", 0.001)
    tries: list[int] = []

    def end() -> None:
        tries.append(1)
        if len(tries) < 3:
            raise Internal("the backup job does not end")

    with bitmap._room(tmp_path, 1 << 62, end) as room:
        until(lambda: room.ended)
        with pytest.raises(SourceSnapshotFailed):
            room.raise_if_full()
    assert len(tries) == 3


DISK = """<disk type='file'><driver type='qcow2'/><source file='{path}'/>{below}<target dev='{target}'/></disk>"""


@pytest.mark.parametrize(
    ("now", "counted"),
    [
        ({"vda": "/a", "vdb": "/b"}, ["vda", "vdb"]),
        ({"vda": "/b", "vdb": "/a"}, []),  # each has the bitmap of the other's changes
        ({"vda": "/a", "vdb": "/c"}, ["vda"]),
        ({"vda": "/snapshot", "vdb": "/b"}, ["vda", "vdb"]),
    ],
)
def test_changes_are_counted_only_of_the_image_that_the_disk_had_before(now: dict[str, str], counted: list[str]) -> None:
    """Nearly empty disks that changed their targets passed for unchanged: the point had one's bytes under the other's name."""
    below = "<backingStore type='file'><source file='/a'/><backingStore/></backingStore>"
    disks = (
        DISK.format(path=path, target=key, below=below if path == "/snapshot" else "<backingStore/>")
        for key, path in now.items()
    )
    exports = {key: jobs.Export(f"synvirt-1-2-{key}", f"synvirt-1-2-{key}") for key in now}
    begun = jobs.Running(snapshot="synvirt-1-2", since="synvirt-1-1", path="/socket", port=None, exports=exports)
    mark = Mark(kind="checkpoint", name="synvirt-1-1")
    named = [Named(target=key, path=path, size_bytes=1, mark=mark) for key, path in (("vda", "/a"), ("vdb", "/b"))]
    base: Any = SimpleNamespace(sealed=SimpleNamespace(disks=named))
    root = parse(f"<domain><devices>{''.join(disks)}</devices></domain>")
    found = [*bitmap._disks(root, begun, "synvirt-1-2", base)]
    assert [disk.target for disk in found if disk.changes is not None] == counted
    assert [disk.target for disk in found if not disk.whole_because] == counted


class Silent:
    """A worker that never serves, as its repository's server hangs."""

    def __init__(self) -> None:
        self.asked = threading.Event()

    async def carry_out(self, _order: Any, _heard: Any, stopped: Callable[[], bool], _on_kept: Any = None) -> Ended:
        self.asked.set()
        while not stopped():
            await asyncio.sleep(0.001)
        return Ended()

    async def send(self, _line: Any) -> None:
        pass


def test_disks_that_nothing_can_serve_have_a_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread ended, and the boot test or the instant start went on without disks."""

    def refused(work: Coroutine[Any, Any, None]) -> None:
        work.close()
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(asyncio, "run", refused)
    order = ServeOrder(repository=RepositorySpec(place=FolderSpec(path="/x"), key=""), point_id="p", sockets={})
    working = Working(Silent)  # type: ignore[arg-type]  # nothing begins
    with pytest.raises(BackupInternal, match="Too many open files"), working.serving(order, lambda: False):
        pytest.fail("nothing is served")


def test_a_run_that_waits_for_its_disks_to_be_served_can_be_cancelled() -> None:
    worker = Silent()

    @asynccontextmanager
    async def workers() -> AsyncIterator[Silent]:
        yield worker

    order = ServeOrder(repository=RepositorySpec(place=FolderSpec(path="/x"), key=""), point_id="p", sockets={})
    with pytest.raises(Cancelled), Working(workers).serving(order, worker.asked.is_set):
        pytest.fail("nothing is served")
