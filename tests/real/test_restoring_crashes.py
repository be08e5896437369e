"""A restore that is killed, before and after each of its steps: the next start leaves nothing of it, or finishes it."""

import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from random import Random
from uuid import UUID, uuid4

import pytest
from defusedxml import ElementTree

from synvirt.backups.model import BackupRun, RestorePoint, RestoreRequest
from synvirt.backups.restores import in_place, new_domain
from synvirt.backups.under_way import UnderWay
from synvirt.backups.working import Copying
from synvirt.disks import open_reader
from synvirt.disks.specs import ImageSpec, RawSpec
from synvirt.hypervisor.libvirt_host import LibvirtHost
from synvirt.model.values import now
from synvirt.repository.keys import CHUNK_BYTES
from tests.contracts.readers import read_all
from tests.fakes.workers import in_process
from tests.needs import need
from tests.real.restores import Room

THEN, NOW = Random(5).randbytes(CHUNK_BYTES // 2), Random(6).randbytes(CHUNK_BYTES // 2)
XML = """<domain type='qemu'><name>{name}</name><uuid>{uuid}</uuid><memory unit='MiB'>{memory}</memory><vcpu>1</vcpu>
<os><type arch='x86_64' machine='q35'>hvm</type></os><devices>
<disk type='file'><driver name='qemu' type='raw'/><source file='{folder}/first.raw'/><target dev='vda'/></disk>
<disk type='file'><driver name='qemu' type='qcow2'/><source file='{folder}/second.qcow2'/><target dev='vdb'/></disk>
</devices></domain>"""


class Killed(BaseException):
    """Nothing of ours runs after it."""


class Steps:
    """Counts calls of what is watched; at number `last` Killed is raised, instead of the call or (`after`) after it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, last: int | None = None, after: bool = False) -> None:
        self._monkeypatch, self._last, self._after = monkeypatch, last, after
        self.count, self.killed = 0, False

    def watch(self, holder: object, name: str) -> None:
        self._monkeypatch.setattr(holder, name, self.counted(getattr(holder, name)))

    def counted(self, call: Callable[..., object]) -> Callable[..., object]:
        def counting(*arguments: object, **named: object) -> object:
            if self.killed:
                raise Killed
            number, self.count = self.count, self.count + 1
            self.killed = number == self._last
            if self.killed and not self._after:
                raise Killed
            answer = call(*arguments, **named)
            if self.killed:
                raise Killed
            return answer

        return counting


@pytest.fixture
def room(host: LibvirtHost, data_dir: Path, tmp_path: Path) -> Iterator[Room]:
    made = Room(host, data_dir, tmp_path, workers=in_process)
    yield made
    made.close()


def restored(
    room: Room, point: RestorePoint, asked: RestoreRequest, steps: Steps, meanwhile: Callable[[], object] = lambda: None
) -> bool:
    """In this thread; whether it came to its end. The next service has started when this returns; `meanwhile` is done between
    the kill and that."""
    backups = room.backups
    run = BackupRun(id=uuid4(), kind="restore", created_at=now(), restore_point_ids=(point.id,))
    run, work = backups._restoring.prepared(run, point, asked)
    ledger = backups._restoring.ledger
    ledger._undo = {kind: steps.counted(undo) for kind, undo in ledger._undo.items()}  # type: ignore[misc]
    for holder, name in (
        (ledger, "record"),
        (ledger, "replace"),
        (ledger, "settle"),
        (ledger, "sweep"),
        (Copying, "copy"),
        (in_place, "_swap"),
        (in_place, "_define"),
        (new_domain, "define"),
    ):
        steps.watch(holder, name)
    under_way = UnderWay(run, lambda: False, backups.runs._save, backups.runs.figures)
    try:
        work(under_way, backups.repositories.opened(room.known.id))
    except Killed:
        steps._monkeypatch.undo()
        backups.close()
        meanwhile()
        room.backups = room.service()
        room.backups.start()
        return False
    steps._monkeypatch.undo()
    return True


def written(room: Room, name: str, content: bytes) -> Path:
    path = room.folder / "images" / name
    path.write_bytes(content)
    return path


def guest(room: Room, uuid: str, name: str, memory: int, content: bytes) -> str:
    """It is defined so, and its disks have this content; its XML."""
    first = written(room, "first.raw", content)
    kept = room.folder / f"{memory}.qcow2"
    if not kept.exists():
        convert = [need("qemu-img", "qemu-utils"), "convert", "-f", "raw", "-O", "qcow2"]
        subprocess.run([*convert, first, kept], check=True)
    shutil.copyfile(kept, room.folder / "images/second.qcow2")
    definition = XML.format(name=name, uuid=uuid, memory=memory, folder=room.folder / "images")
    room.connection.use().defineXML(definition)
    return definition


def state(room: Room, uuid: str) -> tuple[str, bool, bool]:
    """Its memory; whether each disk is as it was then."""
    found = ElementTree.fromstring(room.connection.use().lookupByUUIDString(uuid).XMLDesc(0))
    first, second = room.folder / "images/first.raw", room.folder / "images/second.qcow2"
    with closing(open_reader(ImageSpec(format="qcow2", over=RawSpec(path=str(second))))) as reader:
        contents = [first.read_bytes(), read_all(reader)]
    assert all(content in (THEN, NOW) for content in contents)
    return str(found.findtext("memory")), contents[0] == THEN, contents[1] == THEN


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("after", [False, True])
def test_in_place_a_kill_leaves_the_guest_as_it_is_or_as_it_was(
    room: Room, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    uuid, name = str(uuid4()), f"killed-{uuid4().hex[:8]}"
    definition = guest(room, uuid, name, 64, THEN)
    then = written(room, "then", THEN)
    point = room.point(definition, {"vda": then, "vdb": then}, vm_id=UUID(uuid))
    then.unlink()
    seen: set[tuple[str, bool, bool]] = set()
    for last in range(100):
        guest(room, uuid, name, 96, NOW)
        with monkeypatch.context() as patched:
            ended = restored(room, point, RestoreRequest(target="in_place"), Steps(patched, last=last, after=after))
        found = state(room, uuid)
        seen.add(found)
        assert {one.name for one in (room.folder / "images").iterdir()} == {"first.raw", "second.qcow2"}, last
        assert room.store.ledgers.owned("run", host="local") == [], last
        if ended:
            break
    assert last > 10
    assert seen == {(str(96 * 1024), False, False), (str(64 * 1024), True, True)}, "as it is, or as it was; nothing between"
    assert found == (str(64 * 1024), True, True)


def test_what_a_guest_wrote_between_a_kill_and_the_next_start_is_kept(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    uuid, name = str(uuid4()), f"killed-{uuid4().hex[:8]}"
    definition = guest(room, uuid, name, 64, THEN)
    then = written(room, "then", THEN)
    point = room.point(definition, {"vda": then, "vdb": then}, vm_id=UUID(uuid))
    then.unlink()
    guest(room, uuid, name, 96, NOW)
    meanwhile = Random(7).randbytes(len(NOW))
    with monkeypatch.context() as patched:
        swapping = in_place._swap

        def killed(swap: in_place.Swap) -> None:
            if swap.path.endswith("second.qcow2"):
                swapping(swap)
            steps.killed = True
            raise Killed

        steps = Steps(patched)
        patched.setattr(in_place, "_swap", killed)
        first = room.folder / "images/first.raw"
        ended = restored(room, point, RestoreRequest(target="in_place"), steps, lambda: first.write_bytes(meanwhile))
    assert not ended
    assert first.read_bytes() == meanwhile
    assert {one.name for one in (room.folder / "images").iterdir()} == {"first.raw", "second.qcow2"}
    assert room.store.ledgers.owned("run", host="local") == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_kill_leaves_nothing_of_a_new_domain(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    definition = XML.format(name="x", uuid=uuid4(), memory=64, folder=room.folder / "images")
    then = written(room, "then", THEN)
    point = room.point(definition, {"vda": then, "vdb": then})
    name = f"new-{uuid4().hex[:8]}"
    for last in range(100):
        with monkeypatch.context() as patched:
            asked = RestoreRequest(target="new_domain", name=name)
            ended = restored(room, point, asked, Steps(patched, last=last))
        assert room.store.ledgers.owned("run", host="local") == [], last
        if ended:
            break
        assert name not in room.names(), last
        assert list(room.volumes.rglob("*")) == [], last
    assert last > 6
    volumes = sorted(path for path in room.volumes.rglob("*.raw"))
    assert [[path.read_bytes() == THEN] for path in volumes] == [[True], [True]]
    assert name in room.names()
