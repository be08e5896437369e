"""A service of backups on this host's own hypervisor, with restore points that are made without a guest to back up."""

import contextlib
import time
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

from synvirt.backups.model import ENDS, BackupRepositoryRequest, BackupRun, RestorePoint, RestoreRequest
from synvirt.backups.points import point_of
from synvirt.backups.repositories import Repositories
from synvirt.backups.restores.host import RestoreHost
from synvirt.backups.service import Backups
from synvirt.backups.working import Working
from synvirt.copying import copy
from synvirt.destinations.directory import DirectoryDestination
from synvirt.disks.raw.files import RawReader
from synvirt.hypervisor.libvirt_host import LibvirtHost
from synvirt.jobs.process import Workers, started
from synvirt.kvm.connection import Connection, short_root
from synvirt.model.values import now
from synvirt.repository.disk import ChunkWriter
from synvirt.repository.manifest import Manifest, Named, Sealed, Shown
from synvirt.repository.session import Session
from synvirt.settings import Settings
from synvirt.store import Store

# An emulated guest on a busy machine. Who needs all of it has failed.
PATIENCE_S = 120.0


class Room:
    """`folder` holds all of it but the hypervisor, which is that of `data_dir`, or at `uri`."""

    def __init__(
        self, host: LibvirtHost, data_dir: Path, folder: Path, *, uri: str | None = None, workers: Workers = started
    ) -> None:
        for name in ("keyring", "repository", "volumes", "images"):
            (folder / name).mkdir(exist_ok=True)
        self.folder, self.host, self.workers = folder, host, workers
        self.connection = Connection(uri or Settings(data_dir=data_dir).hypervisor_uri, lambda: None)
        self.store = Store(f"sqlite:///{folder / 'test.db'}")
        self.volumes = folder / "volumes"
        self.restore_host = RestoreHost(
            hypervisor=host,
            connection=self.connection,
            destinations={"directory": DirectoryDestination(self.volumes)},
            tpm_folder=lambda: data_dir / "libvirt/lib/swtpm",
            scratch=self.scratch,
            screens=folder / "screens",
            boot_timeout_s=PATIENCE_S,
            alone=lambda vm_id, stop: contextlib.nullcontext(),
        )
        self.backups = self.service()
        self.backups.start()
        request = BackupRepositoryRequest(name="here", kind="local", path=str(folder / "repository"))
        self.known = self.backups.add_repository(request)

    def scratch(self) -> Path:
        return (short_root(self.connection.uri) or self.folder) / "boot-tests"

    def service(self) -> Backups:
        def no_guest(*_: object) -> object:
            raise NotImplementedError

        repositories = Repositories(self.store.backups, host="local", keyring=self.folder / "keyring", **self._caches())
        return Backups(
            self.store.backups,
            repositories,
            host="local",
            open_guest=no_guest,  # type: ignore[arg-type]
            exports=self.folder / "exports",
            restore_host=self.restore_host,
            working=Working(self.workers),
        )

    def _caches(self) -> dict[str, Any]:
        return {"caches": self.folder / "caches"}

    def point(self, xml: str, disks: dict[str, Path], *, vm_id: UUID | None = None, **sealed: object) -> RestorePoint:
        """Of the raw files `disks`, by target."""
        session = Session(self.backups.repositories.opened(self.known.id))
        maps = []
        for path in disks.values():
            reader = RawReader(str(path))
            writer = ChunkWriter(session, reader.size)
            copy(reader, writer, fresh=False)
            maps.append(writer.finish())
            reader.close()
        named = tuple(
            Named(target=target, path=str(path), size_bytes=one.size_bytes)
            for (target, path), one in zip(disks.items(), maps, strict=True)
        )
        manifest = Manifest(
            shown=Shown(id=uuid4(), created_at=now(), disks=tuple(maps)),
            sealed=Sealed.model_validate(
                {
                    "vm_id": str(vm_id or uuid4()),
                    "vm_name": f"guest-{uuid4().hex[:8]}",
                    "consistency": "offline",
                    "job_id": uuid4(),
                    "run_id": uuid4(),
                    "domain_xml": xml,
                    "disks": named,
                    **sealed,
                }
            ),
        )
        session.commit(manifest)
        point = point_of(manifest, self.known, stored_bytes=0)
        self.backups.points.put(point)
        return point

    def restored(self, point: RestorePoint, **fields: object) -> BackupRun:
        return self.ended(self.backups.restore(point.id, RestoreRequest.model_validate(fields)))

    def ended(self, run: BackupRun) -> BackupRun:
        until = time.monotonic() + PATIENCE_S
        while (now_ := self.backups.runs.get(run.id)).status not in ENDS:
            assert time.monotonic() < until, now_
            time.sleep(0.02)
        return now_

    def names(self) -> set[str]:
        return {domain.name() for domain in self.connection.use().listAllDomains()}

    def close(self) -> None:
        self.backups.close()
        self.store.close()
