"""Runs that need a hypervisor: libvirt's embedded driver outlives each service, as QEMU's guests do."""

import shutil
import subprocess
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Literal
from uuid import UUID, uuid4

import pytest
from defusedxml import ElementTree

from synvirt.backups.model import BackupRun, RestorePoint, RestoreRequest
from synvirt.backups.restores import in_place, new_domain, present
from synvirt.disks import open_reader
from synvirt.disks.specs import ImageSpec, RawSpec
from synvirt.hypervisor.libvirt_host import LibvirtHost
from synvirt.repository.keys import CHUNK_BYTES
from synvirt.settings import Settings
from synvirt.store import Store
from tests.contracts.readers import read_all
from tests.fakes.workers import in_process
from tests.kinds.laws import End, Place, World
from tests.kinds.runs import OPEN, rows_left
from tests.needs import need
from tests.real.backups.restores import Room
from tests.real.guests import WRITES, boot_sector

THEN, NOW = Random(5).randbytes(CHUNK_BYTES // 2), Random(6).randbytes(CHUNK_BYTES // 2)
XML = """<domain type='qemu'><name>{name}</name><uuid>{uuid}</uuid><memory unit='MiB'>{memory}</memory><vcpu>1</vcpu>
<os><type arch='x86_64' machine='q35'>hvm</type></os><devices>
<disk type='file'><driver name='qemu' type='raw'/><source file='{folder}/first.raw'/><target dev='vda'/></disk>
<disk type='file'><driver name='qemu' type='qcow2'/><source file='{folder}/second.qcow2'/><target dev='vdb'/></disk>
</devices></domain>"""


class OnLibvirt(World):
    """A service with a point of a guest whose disks are `self.images`."""

    kind: Literal["restore", "boot_test"] = "restore"

    def __init__(self, place: Place) -> None:
        self.place = place
        if "room" not in place.outside:
            assert place.data_dir is not None
            place.outside["room"] = Room(place.host, place.data_dir, place.folder, workers=in_process)
            self.room: Room = place.outside["room"]
        else:
            self.room = place.outside["room"]
            self.room.store.close()
            self.room.store = Store(f"sqlite:///{place.folder / 'test.db'}")
            self.before(self.room.store)
            self.room.backups = self.room.service()
            self.room.backups.start()
        self.store = self.room.store

    def before(self, store: Store) -> None:
        """What a service finds, before it goes on with anything."""

    def written(self, name: str, content: bytes) -> Path:
        path = self.room.folder / "images" / name
        path.write_bytes(content)
        return path

    @property
    def point(self) -> RestorePoint:
        found: RestorePoint = self.place.outside["point"]
        return found

    def found(self) -> UUID | None:
        runs, _ = self.room.backups.runs.page(limit=10, cursor=None)
        return runs[0].id if runs else None

    def ended(self, job_id: UUID) -> BackupRun:
        return self.room.ended(self.room.backups.runs.get(job_id))

    def run(self, job_id: UUID) -> End:
        return str(self.ended(job_id).status).capitalize()  # type: ignore[return-value]

    def problem(self, job_id: UUID) -> str:
        return str(self.room.backups.runs.get(job_id).error)

    def cancel(self, job_id: UUID) -> None:
        self.room.backups.runs.cancel(job_id)

    def left(self, job_id: UUID | None) -> list[str]:
        scratch = self.room.scratch()
        return rows_left(self.store) + [str(path) for path in scratch.rglob("*")]

    def die(self) -> None:
        self.room.backups.close()

    def close(self) -> None:
        self.room.backups.close()
        self.room.store.close()


class NewDomain(OnLibvirt):
    name = "new"

    def prepare(self) -> None:
        then = self.written("then", THEN)
        definition = XML.format(name="x", uuid=uuid4(), memory=64, folder=self.room.folder / "images")
        self.place.outside["point"] = self.room.point(definition, {"vda": then, "vdb": then})
        self.place.outside["name"] = f"new-{uuid4().hex[:8]}"

    def submit(self) -> UUID:
        request = RestoreRequest(target="new_domain", name=self.place.outside["name"])
        return self.room.backups.restore(self.point.id, request).id

    def steps(self) -> Sequence[tuple[object, str]]:
        return [(new_domain, "define")]

    def check(self, job_id: UUID) -> None:
        volumes = sorted(self.room.volumes.rglob("*.raw"))
        assert [path.read_bytes() == THEN for path in volumes] == [True, True]
        assert self.place.outside["name"] in self.room.names()

    def check_undone(self, job_id: UUID) -> None:
        assert self.place.outside["name"] not in self.room.names()

    def left(self, job_id: UUID | None) -> list[str]:
        left = super().left(job_id)
        if job_id is None:
            left += [str(path) for path in self.room.volumes.rglob("*")]
            left += [name for name in self.room.names() if name == self.place.outside["name"]]
        return left


class InPlace(OnLibvirt):
    """The guest of the point is there, and has other bytes and more memory now."""

    def prepare(self) -> None:
        self.place.outside |= {"uuid": str(uuid4()), "name": f"killed-{uuid4().hex[:8]}"}
        definition = self._guest(64, THEN)
        then = self.written("then", THEN)
        uuid = UUID(self.place.outside["uuid"])
        self.place.outside["point"] = self.room.point(definition, {"vda": then, "vdb": then}, vm_id=uuid)
        then.unlink()
        self._guest(96, NOW)

    def _guest(self, memory: int, content: bytes) -> str:
        """It is defined so, and its disks have this content; its XML."""
        folder = self.room.folder / "images"
        first = self.written("first.raw", content)
        convert = [need("qemu-img", "qemu-utils"), "convert", "-f", "raw", "-O", "qcow2"]
        subprocess.run([*convert, first, folder / "second.qcow2"], check=True)
        known = {name: self.place.outside[name] for name in ("name", "uuid")}
        definition = XML.format(**known, memory=memory, folder=folder)
        self.room.connection.use().defineXML(definition)
        return definition

    def submit(self) -> UUID:
        return self.room.backups.restore(self.point.id, RestoreRequest(target="in_place")).id

    def steps(self) -> Sequence[tuple[object, str]]:
        return [(in_place, "_swap"), (present, "define")]

    def _state(self) -> tuple[str, bool, bool]:
        """Its memory; whether each disk is as it was then."""
        domain = self.room.connection.use().lookupByUUIDString(self.place.outside["uuid"])
        first, second = (self.room.folder / "images" / name for name in ("first.raw", "second.qcow2"))
        with closing(open_reader(ImageSpec(format="qcow2", over=RawSpec(path=str(second))))) as reader:
            contents = [first.read_bytes(), read_all(reader)]
        assert all(content in (THEN, NOW) for content in contents)
        return str(ElementTree.fromstring(domain.XMLDesc(0)).findtext("memory")), contents[0] == THEN, contents[1] == THEN

    AS_IT_IS, AS_IT_WAS = (str(96 * 1024), False, False), (str(64 * 1024), True, True)

    def check_started(self) -> None:
        """One that goes on may have begun already."""
        if (found := self.found()) is not None:
            self.ended(found)
        assert self._state() in (self.AS_IT_IS, self.AS_IT_WAS), "nothing between"

    def check(self, job_id: UUID) -> None:
        assert self._state() == self.AS_IT_WAS
        restored = self.room.backups.runs.get(job_id).domain
        assert restored is not None
        assert (restored.name, str(restored.uuid)) == (self.place.outside["name"], self.place.outside["uuid"])

    def check_undone(self, job_id: UUID) -> None:
        """Once the first of its disks was taken, it goes forward, whatever is requested."""
        assert self._state() in (self.AS_IT_IS, self.AS_IT_WAS)

    def left(self, job_id: UUID | None) -> list[str]:
        images = {"first.raw", "second.qcow2"}
        return super().left(job_id) + [one.name for one in (self.room.folder / "images").iterdir() if one.name not in images]


class BootTest(OnLibvirt):
    """Its guest is a boot sector, and writes forever."""

    kind = "boot_test"

    def __init__(self, place: Place) -> None:
        self.starts: list[UUID] = []
        self.patched = pytest.MonkeyPatch()
        start = LibvirtHost.start

        def counted(host: LibvirtHost, domain_id: UUID) -> None:
            self.starts.append(domain_id)
            start(host, domain_id)

        self.patched.setattr(LibvirtHost, "start", counted)
        if "quick" not in place.outside:
            assert place.data_dir is not None
            quick = LibvirtHost(Settings(data_dir=place.data_dir).hypervisor_uri, place.data_dir, boot_activity_s=4)
            place.outside["quick"], place.host = quick, quick
            place.closing.callback(quick.close)
        super().__init__(place)

    def prepare(self) -> None:
        disk = boot_sector(self.room.folder / "images/disk.raw", WRITES)
        shutil.copyfile(disk, self.room.folder / "images/first.raw")
        definition = XML.format(name="x", uuid=uuid4(), memory=64, folder=self.room.folder / "images")
        first, _, last = definition.splitlines()[2:5]
        one = "\n".join((*definition.splitlines()[:2], first, last))
        self.place.outside["point"] = self.room.point(one, {"vda": disk})

    def before(self, store: Store) -> None:
        """Whether the test that was there goes on, and had its result by then."""
        self.goes_on = store.backups.all("run", host="local", states=OPEN) != []
        self.had_result = store.backups.all("watermarks", host="local") != []

    def check_not_again(self) -> None:
        assert len(self.starts) == (self.goes_on and not self.had_result)

    def submit(self) -> UUID:
        return self.room.backups.boot_test(self.point.id).id

    def check(self, job_id: UUID) -> None:
        found = self.room.backups.points.get(self.point.id).boot_test
        assert found is not None
        assert found.result == "booted"

    def check_undone(self, job_id: UUID) -> None:
        assert self.room.backups.points.get(self.point.id).boot_test is None

    def left(self, job_id: UUID | None) -> list[str]:
        return super().left(job_id) + [name for name in self.room.names() if name.startswith("boot-test-")]

    def close(self) -> None:
        super().close()
        self.patched.undo()
