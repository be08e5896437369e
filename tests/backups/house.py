"""A service of backups in the test's own process, with guests of one raw disk each."""

from pathlib import Path
from uuid import UUID

from synvirt.backups.model import BackupJob, BackupJobRequest, BackupRepositoryRequest, BackupRun
from synvirt.backups.retention import Retention
from synvirt.repository.keys import CHUNK_BYTES
from synvirt.store import Store
from tests.drawn import drawn
from tests.fakes.backups import FakeGuests, backups_of, ended


class House:
    """A host with guests of one raw disk each."""

    def __init__(self, folder: Path, *, started: bool = True) -> None:
        self.folder = folder
        (folder / "repository").mkdir(exist_ok=True)
        self.store = Store(f"sqlite:///{folder / 'test.db'}")
        self.guests = FakeGuests(folder / "images")
        self.backups = backups_of(self.store, self.guests, folder)
        if started:
            self.backups.start()

    def image(self, name: str, content: bytes) -> None:
        self.guests.image(name, content)

    def repository(self, *, recovery_key: str | None = None) -> UUID:
        path = str(self.folder / "repository")
        request = BackupRepositoryRequest(name="here", kind="local", path=path, recovery_key=recovery_key)
        return self.backups.add_repository(request).id

    def job(self, *vm_ids: str, repository: UUID | None = None, retention: Retention | None = None) -> BackupJob:
        return self.backups.add_job(
            BackupJobRequest(
                name=f"nightly-{len(self.backups.all_jobs())}",
                vm_ids=vm_ids,
                repository_id=repository or self.repository(),
                retention=retention or Retention(),
            )
        )

    def ended(self, run: BackupRun) -> BackupRun:
        return ended(self.backups, run.id)

    def run(self, job: BackupJob) -> BackupRun:
        return self.ended(self.backups.run_job(job.id))

    def close(self) -> None:
        self.backups.close()
        self.store.close()


def disk_content() -> bytes:
    return drawn(2 * CHUNK_BYTES + 7, zeros=3 * CHUNK_BYTES)
