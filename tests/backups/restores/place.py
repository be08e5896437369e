"""A service that restores to new domains, on a hypervisor in memory, and what its restores leave."""

from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from synvirt.backups.model import BackupJobRequest, BackupRepositoryRequest, BackupRun, RestoreRequest, Status
from synvirt.errors import BackupConflict
from synvirt.jobs.exports import Exports
from synvirt.jobs.process import started
from synvirt.repository.keys import CHUNK_BYTES
from synvirt.store import Store
from tests.drawn import drawn
from tests.fakes.backups import FakeGuests, backups_of, ended
from tests.fakes.exports import FakeExports
from tests.fakes.hypervisor import FakeDomain, FakeHypervisor
from tests.fakes.restoring import XML, restore_host_of
from tests.fakes.workers import in_process
from tests.kinds.runs import rows_left
from tests.running.processes import until


def disk_content() -> bytes:
    return drawn(2 * CHUNK_BYTES)


class Place:
    """A service with a point of a guest, and the services after it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.hypervisor, self.exports = folder, FakeHypervisor(), FakeExports(folder / "instant")
        self.processes: Exports | None = None
        self.guests = FakeGuests(folder / "guests")
        self.guests.xml = XML
        self.guests.image("web", disk_content())
        (folder / "repository").mkdir()
        self.begin()
        request = BackupRepositoryRequest(name="here", kind="local", path=str(folder / "repository"))
        self.repository = self.backups.add_repository(request).id
        self.job = self.backups.add_job(BackupJobRequest(name="nightly", vm_ids=("web",), repository_id=self.repository)).id
        (self.point,) = ended(self.backups, self.backups.run_job(self.job).id).restore_point_ids

    def begin(self) -> None:
        """A service."""
        self.store = Store(f"sqlite:///{self.folder / 'test.db'}")
        self.restore_host = restore_host_of(self.folder, self.hypervisor, exports=self.processes or self.exports)
        workers = started if self.processes else in_process
        self.backups = backups_of(self.store, self.guests, self.folder, workers, restore_host=self.restore_host)
        self.backups.start()

    def close(self) -> None:
        self.backups.close()
        self.store.close()

    def restart(self) -> None:
        self.close()
        self.begin()

    def restore(self, bandwidth_bps: int | None = None, **fields: Any) -> "Restored":
        request = {"target": "new_domain", "name": "again", "start": True, "instant": True, "bandwidth_bps": bandwidth_bps}
        return Restored(self, self.backups.restore(self.point, RestoreRequest.model_validate(request | fields)).id)

    def damage(self) -> None:
        for pack in (self.folder / "repository/packs").rglob("*.pack"):
            content = bytearray(pack.read_bytes())
            content[1000] ^= 1
            pack.write_bytes(content)

    def left(self) -> list[str]:
        left = [str(path) for name in ("volumes", "instant") for path in (self.folder / name).rglob("*")]
        left += [f"domain {uuid}" for uuid in self.hypervisor.domains]
        return left + rows_left(self.store)


class Restored:
    def __init__(self, place: Place, run_id: UUID) -> None:
        self.place, self.id = place, run_id

    @property
    def run(self) -> BackupRun:
        return self.place.backups.runs.get(self.id)

    @property
    def guest(self) -> FakeDomain:
        return self.place.hypervisor.domains[self.id]

    @property
    def state(self) -> str | None:
        instant_ = self.run.instant
        return None if instant_ is None else instant_.state

    def writes(self, offset: int = 5000) -> bytes:
        """What its volume is to hold in the end."""
        self.place.hypervisor.guest_writes(self.id, 0, offset, b"written meanwhile")
        return disk_content()[:offset] + b"written meanwhile" + disk_content()[offset + 17 :]

    def runs(self) -> None:
        until(lambda: self.run.status is Status.TRANSFERRING and self.run.progress.bytes_done > 0)
        assert self.guest.running

    def cancelled(self) -> None:
        """Only where that is meant; then nothing is left."""
        with pytest.raises(BackupConflict, match="loses all that it wrote"):
            self.place.backups.runs.cancel(self.id)
        assert self.guest.running
        self.place.backups.runs.cancel(self.id, guest_writes="lose")
        assert ended(self.place.backups, self.id).status is Status.CANCELLED
        assert self.place.left() == []

    def completed(self, content: bytes) -> BackupRun:
        run = ended(self.place.backups, self.id)
        assert (run.status, run.error) == (Status.COMPLETED, None)
        assert self.state == "done"
        (volume,) = (self.place.folder / "volumes").rglob("*.raw")
        assert str(volume) in self.guest.domain.xml
        assert volume.read_bytes() == content
        assert not list((self.place.folder / "instant").rglob("*"))
        assert rows_left(self.place.store) == []
        return run
