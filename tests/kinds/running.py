"""A backup of a guest that runs: QEMU holds its disks at one moment, and counts what changes for the next run. It outlives the
service with both."""

import contextlib
import subprocess
from collections.abc import Sequence
from typing import Any
from uuid import UUID, uuid4

from synvirt.backups.model import BackupJobRequest, BackupRepositoryRequest
from synvirt.backups.service import Backups
from synvirt.backups.sources.ways import job_folder, sources_of
from synvirt.kvm.connection import Connection
from synvirt.live.libvirt import backup as jobs
from synvirt.settings import Settings
from tests.fakes.backups import backups_of
from tests.kinds.laws import Place
from tests.kinds.runs import CONTENT, HOST, Backup
from tests.needs import need

# It finds nothing to boot from, and runs on.
XML = """<domain type='qemu'><name>{name}</name><memory unit='MiB'>64</memory><vcpu>1</vcpu>
<os><type arch='x86_64' machine='q35'>hvm</type></os><devices>
<disk type='file'><driver name='qemu' type='qcow2'/><source file='{folder}/disk.qcow2'/><target dev='vda'/></disk>
</devices></domain>"""
# Of a domain with checkpoints, whose images go anyhow.
_METADATA = 2 | 8 | 16


class ByBitmap(Backup):
    """The second run of its job: the first has left a point, and the bitmap that this one counts from."""

    content = CONTENT + bytes(-len(CONTENT) % 512)

    def __init__(self, place: Place) -> None:
        assert place.data_dir is not None
        self.connection = Connection(Settings(data_dir=place.data_dir).hypervisor_uri, lambda: None)
        super().__init__(place)

    def service(self) -> Backups:
        self.sources = sources_of(self.connection, self.store.backups, host=HOST)
        self.sources.start()
        return backups_of(self.store, self.sources, self.place.folder)

    def prepare(self) -> None:
        folder = self.place.folder
        image, name = folder / "disk.raw", f"backed-up-{uuid4().hex[:8]}"
        image.write_bytes(self.content)
        convert = [need("qemu-img", "qemu-utils"), "convert", "-f", "raw", "-O", "qcow2"]
        subprocess.run([*convert, image, folder / "disk.qcow2"], check=True)
        domain = self.connection.use().defineXML(XML.format(name=name, folder=folder))
        self.place.outside["uuid"] = domain.UUIDString()
        self.place.closing.callback(self._gone, domain)
        domain.create()
        (folder / "repository").mkdir()
        asked = BackupRepositoryRequest(name="here", kind="local", path=str(folder / "repository"))
        known = self.backups.add_repository(asked)
        wanted = BackupJobRequest(name="nightly", vm_ids=(name,), repository_id=known.id, quiesce="off")
        self.place.outside |= {"repository": known.id, "job": self.backups.add_job(wanted).id, "before": set[UUID]()}
        self.backed_up()

    @staticmethod
    def _gone(domain: Any) -> None:
        with contextlib.suppress(Exception):
            domain.destroy()
        domain.undefineFlags(_METADATA)

    @property
    def domain(self) -> Any:
        return self.connection.use().lookupByUUIDString(self.place.outside["uuid"])

    def steps(self) -> Sequence[tuple[object, str]]:
        return [(jobs, "begin"), (jobs, "end"), (jobs, "delete")]

    def check(self, job_id: UUID) -> None:
        self.backups.look()
        run = self.backups.runs.get(job_id)
        assert len(self.points()) == 2
        assert all(disk.changes_only for guest in run.guests for disk in guest.disks)
        journals = list((self.place.folder / "journals").rglob("*.stored"))
        if len(self.domain.listAllCheckpoints(0)) > 1 or journals:
            # Killed when its point was written, or about to be: which of two marks is wanted, the job's next run knows.
            assert self.backed_up().disks

    def check_undone(self, job_id: UUID) -> None:
        self.backups.look()
        assert len(self.points()) == 1

    def left(self, job_id: UUID | None) -> list[str]:
        """One mark stays, for the job's next run."""
        self.sources.close()
        with self.store._engine.connect() as db:
            states = db.exec_driver_sql("SELECT state FROM ledger WHERE kind = 'bitmap'").scalars().all()
        marks = [one.getName() for one in self.domain.listAllCheckpoints(0)]
        left = [one for one in super().left(job_id) if not one.startswith("bitmap ")]
        left += [] if states == ["lasting"] else [f"marks {states}"]
        left += [] if len(marks) == 1 else [f"checkpoints {marks}"]
        left += [] if jobs.running(self.domain) is None else ["a backup job"]
        return left + [str(path) for path in job_folder(self.connection).glob("*")]

    def close(self) -> None:
        super().close()
        self.sources.close()
