"""The repositories that this host knows: where they lie, and their keys, a file each in {data_dir}/keyring."""

import contextlib
import os
import threading
from pathlib import Path
from uuid import UUID, uuid4

from synvirt.backups import repository as stored
from synvirt.backups.folder import HostFolder
from synvirt.backups.keys import from_recovery_text, new_key, recovery_text
from synvirt.backups.model import BackupRepository, BackupRepositoryRequest
from synvirt.backups.repository import Repository
from synvirt.durable import sync_folder
from synvirt.errors import BackupConflict, Internal, SynvirtError
from synvirt.keyring import KEY_MODE, migrator_key
from synvirt.model import now
from synvirt.store.backups import BackupRows


class Repositories:
    """`caches`: a folder for what is copied of repositories so that it need not be fetched again; None: nothing is."""

    def __init__(self, rows: BackupRows, *, host: str, keyring: Path, caches: Path | None = None) -> None:
        self._rows, self._host, self._keyring, self._caches = rows, host, keyring, caches
        self._open: dict[UUID, Repository] = {}
        self._lock = threading.Lock()

    def add(self, asked: BackupRepositoryRequest) -> BackupRepository:
        """A new one in an empty folder, or with its recovery key one that is there. BackupConflict, RepositoryUnreachable,
        RepositoryKeyWrong, RepositoryDamaged."""
        folder = HostFolder(Path(asked.path), is_mount=asked.kind == "nfs")
        known = [BackupRepository.model_validate_json(text) for text in self._rows.all("repository", host=self._host)]
        if any(one.name == asked.name or Path(one.path) == Path(asked.path) for one in known):
            raise BackupConflict(f"a repository is named {asked.name!r} or lies at {asked.path} already")
        made = BackupRepository(id=uuid4(), name=asked.name, kind=asked.kind, path=asked.path, created_at=now())
        master = new_key() if asked.recovery_key is None else from_recovery_text(asked.recovery_key)
        if asked.recovery_key is not None:
            Repository(folder, master)
        self._write_key(made.id, master)  # before anything is sealed with it
        try:
            if asked.recovery_key is None:
                stored.create(folder, master)
            self._rows.put("repository", made.id, made.model_dump_json(), host=self._host)
        except SynvirtError:
            self._key_path(made.id).unlink(missing_ok=True)
            raise
        return self.shown(made)

    def get(self, repository_id: UUID) -> BackupRepository:
        return BackupRepository.model_validate_json(self._rows.get("repository", repository_id, host=self._host))

    def page(self, *, limit: int, cursor: int | None) -> tuple[list[BackupRepository], int | None]:
        texts, following = self._rows.page("repository", host=self._host, limit=limit, cursor=cursor)
        return [self.shown(BackupRepository.model_validate_json(text)) for text in texts], following

    def shown(self, known: BackupRepository) -> BackupRepository:
        """With what is found there now."""
        try:
            capacity, used = HostFolder(Path(known.path), is_mount=known.kind == "nfs").room()
            count = len(self.opened(known.id).point_ids())
        except SynvirtError as error:
            return known.model_copy(update={"state": "unreachable", "problem": error.detail})
        return known.model_copy(update={"capacity_bytes": capacity, "used_bytes": used, "points_count": count})

    def opened(self, repository_id: UUID) -> Repository:
        """Its folder looked at first: an NFS export that is gone must not be an empty folder."""
        known = self.get(repository_id)
        folder = HostFolder(Path(known.path), is_mount=known.kind == "nfs")
        with self._lock:
            if repository_id not in self._open:
                cache = None if self._caches is None else self._caches / f"{repository_id}.footers"
                master = migrator_key(self._key_path(repository_id))
                self._open[repository_id] = Repository(folder, master, cache=cache)
            return self._open[repository_id]

    def recovery_key(self, repository_id: UUID) -> str:
        self.get(repository_id)
        return recovery_text(migrator_key(self._key_path(repository_id)))

    def forget(self, repository_id: UUID) -> None:
        """What lies in the folder stays, and so does the key."""
        self._rows.remove("repository", repository_id, host=self._host)
        with self._lock:
            self._open.pop(repository_id, None)

    def _key_path(self, repository_id: UUID) -> Path:
        return self._keyring / f"backup-{repository_id}.key"

    def _write_key(self, repository_id: UUID, master: bytes) -> None:
        path = self._key_path(repository_id)
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, KEY_MODE)
            with os.fdopen(descriptor, "wb") as file:
                file.write(master)
                file.flush()
                os.fsync(file.fileno())
            sync_folder(path.parent)
        except OSError as error:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            raise Internal(f"the repository's key cannot be kept: {error.strerror}") from error
