"""A backup of a guest that runs: QEMU holds its disks at one moment, and counts what changes for the next run. It outlives the
service with both."""

import contextlib
import subprocess
from collections.abc import Sequence
from typing import Any
from uuid import UUID, uuid4

from synvirt.backups.service import Backups
from synvirt.backups.sources.ways import job_folder, sources_of
from synvirt.kvm.connection import Connection
from synvirt.live.libvirt import backup as jobs
from synvirt.settings import Settings
from tests.fakes.backups import backups_of
from tests.kinds.laws import Place
from tests.kinds.runs import HOST, BackupAgain
from tests.needs import need

# It finds nothing to boot from, and runs on.
XML = """<domain type='qemu'><name>{name}</name><memory unit='MiB'>64</memory><vcpu>1</vcpu>
<os><type arch='x86_64' machine='q35'>hvm</type></os><devices>
<disk type='file'><driver name='qemu' type='qcow2'/><source file='{folder}/disk.qcow2'/><target dev='vda'/></disk>
</devices></domain>"""
# Of a domain with checkpoints, whose images go anyhow.
_METADATA = 2 | 8 | 16


class ByBitmap(BackupAgain):
    """The mark is a bitmap, and a checkpoint that names it."""

    way = "bitmap"

    @property
    def content(self) -> bytes:
        return super().content + bytes(-len(super().content) % 512)

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
        self.first_run(name)

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

    def marks(self) -> list[str]:
        return [one.getName() for one in self.domain.listAllCheckpoints(0)]

    def left(self, job_id: UUID | None) -> list[str]:
        left = super().left(job_id)
        left += [] if jobs.running(self.domain) is None else ["a backup job"]
        return left + [str(path) for path in job_folder(self.connection).glob("*")]
