"""The repositories that this host knows: where they lie, and their keys, a file each in {data_dir}/keyring."""

import base64
import contextlib
import os
import threading
from pathlib import Path
from uuid import UUID, uuid4

from synvirt.backups.authors import Authors
from synvirt.backups.model import BackupPeer, BackupRepository, BackupRepositoryRequest, PeerRequest
from synvirt.durable import sync_folder
from synvirt.errors import BackupBadRequest, BackupConflict, Internal, SynvirtError
from synvirt.keyring import KEY_MODE, migrator_key
from synvirt.model.values import now
from synvirt.repository import repository as stored
from synvirt.repository.folder import HostFolder
from synvirt.repository.keys import Keys, from_recovery_text, new_key, recovery_text
from synvirt.repository.peer import PATIENCE_S, PeerFolder, PeerPlace
from synvirt.repository.repository import Repository
from synvirt.repository.specs import FolderSpec, PeerSpec, RepositorySpec
from synvirt.store.backups import BackupRows
from synvirt.store.documents import parsed, readable


class _Known(BackupRepository):
    """As it is kept. `sealed`: the password of a peer's account, in base64, with the repository's key."""

    sealed: str | None = None


class Repositories:
    """`caches`: a folder for what is copied of repositories so that it need not be fetched again; None: nothing is.
    `allowed_hosts`: where peers may be, as the setting source_allowed_hosts says. `authors`: who signs points, and who is
    known; None: nobody."""

    def __init__(
        self,
        rows: BackupRows,
        *,
        host: str,
        keyring: Path,
        caches: Path | None = None,
        allowed_hosts: tuple[str, ...] = (),
        authors: Authors | None = None,
    ) -> None:
        self.authors = authors or Authors()
        self._rows, self._host, self._keyring, self._caches = rows, host, keyring, caches
        self._allowed_hosts = allowed_hosts
        self._open: dict[UUID, Repository] = {}
        self._lock = threading.Lock()

    def add(self, asked: BackupRepositoryRequest) -> BackupRepository:
        """A new one in an empty folder, or with its recovery key one that is there. BackupConflict, RepositoryUnreachable,
        RepositoryKeyWrong, RepositoryDamaged."""
        master = new_key() if asked.recovery_key is None else from_recovery_text(asked.recovery_key)
        made = _made(asked, master)
        folder = _folder(made, master, self._allowed_hosts)
        known = readable(_Known, self._rows.all("repository", host=self._host))
        if any(one.name == made.name or one.place == made.place for one in known):
            raise BackupConflict(f"a repository is named {made.name!r} or lies at {made.place} already")
        if asked.recovery_key is not None:
            Repository(folder, master).close()
        self._write_key(made.id, master)  # before anything is sealed with it
        try:
            with contextlib.closing(folder):
                if asked.recovery_key is None:
                    stored.create(folder, master)
            self._rows.put("repository", made.id, made, host=self._host)
        except SynvirtError:
            self._key_path(made.id).unlink(missing_ok=True)
            raise
        return self.shown(made)

    def get(self, repository_id: UUID) -> BackupRepository:
        return _shown(self._known(repository_id))

    def _known(self, repository_id: UUID) -> "_Known":
        return parsed(_Known, self._rows.get("repository", repository_id, host=self._host))

    def page(self, *, limit: int, cursor: int | None) -> tuple[list[BackupRepository], int | None]:
        texts, following = self._rows.page("repository", host=self._host, limit=limit, cursor=cursor)
        return [self.shown(one) for one in readable(_Known, texts)], following

    def known(self) -> list[BackupRepository]:
        """As they were added, oldest first: none is looked at, and so none is waited for."""
        return [*readable(_Known, self._rows.all("repository", host=self._host))]

    def shown(self, known: BackupRepository) -> BackupRepository:
        """With what is found there now."""
        try:
            with contextlib.closing(self._folder_of(known.id, patience_s=0)) as folder:
                capacity, used = folder.room()
            count = len(self.opened(known.id).point_ids())
        except SynvirtError as error:
            return _shown(known).model_copy(update={"state": "unreachable", "problem": error.detail})
        return _shown(known).model_copy(update={"capacity_bytes": capacity, "used_bytes": used, "points_count": count})

    def opened(self, repository_id: UUID) -> Repository:
        """Its folder looked at first: an NFS export that is gone must not be an empty folder."""
        with self._lock:
            opened = self._open.get(repository_id)
            if opened is None:
                cache = None if self._caches is None else self._caches / f"{repository_id}.footers"
                opened = Repository(self._folder_of(repository_id), self._key(repository_id), cache=cache)
                self._open[repository_id] = opened
            elif isinstance(opened.folder, HostFolder):
                opened.folder.check()
            return opened

    def spec(self, repository_id: UUID) -> RepositorySpec:
        """For a worker, which opens the repository by itself: the key is in it."""
        known, master = self._known(repository_id), self._key(repository_id)
        place: FolderSpec | PeerSpec = FolderSpec(path=known.path or "", nfs=known.kind == "nfs")
        if known.peer is not None:
            place = PeerSpec(**known.peer.model_dump(), password=_password(known, master), allowed_hosts=self._allowed_hosts)
        cache = None if self._caches is None else str(self._caches / f"{repository_id}.footers")
        return RepositorySpec(place=place, key=base64.b64encode(master).decode(), cache=cache)

    def _folder_of(self, repository_id: UUID, *, patience_s: float = PATIENCE_S) -> HostFolder | PeerFolder:
        known, master = self._known(repository_id), self._key(repository_id)
        return _folder(known, master, self._allowed_hosts, patience_s=patience_s)

    def _key(self, repository_id: UUID) -> bytes:
        return migrator_key(self._key_path(repository_id))

    def recovery_key(self, repository_id: UUID) -> str:
        self.get(repository_id)
        return recovery_text(self._key(repository_id))

    def forget(self, repository_id: UUID) -> None:
        """What lies in the folder stays, and so does the key."""
        self._rows.remove("repository", repository_id, host=self._host)
        with self._lock:
            opened = self._open.pop(repository_id, None)
        if opened is not None:
            opened.folder.close()  # a run that reads from it still may go on

    def close(self) -> None:
        """When nothing reads or writes any more."""
        with self._lock:
            opened, self._open = list(self._open.values()), {}
        for repository in opened:
            repository.close()

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


def _made(asked: BackupRepositoryRequest, master: bytes) -> _Known:
    """BackupBadRequest."""
    made = _Known(id=uuid4(), name=asked.name, kind=asked.kind, path=asked.path, created_at=now())
    if asked.peer is None:
        return made
    username, password = _credentials(asked.peer)
    sealed = Keys(master).seal(password.encode(), belongs_to=_belongs_to(made.id))
    peer = BackupPeer(url=asked.peer.url.rstrip("/"), fingerprint_sha256=asked.peer.fingerprint_sha256, username=username)
    return made.model_copy(update={"peer": peer, "sealed": base64.b64encode(sealed).decode()})


def _credentials(asked: PeerRequest) -> tuple[str, str]:
    found = {name: secret.get_secret_value() for name, secret in asked.credentials.items()}
    if set(found) != {"username", "password"}:
        raise BackupBadRequest("peer.credentials has a username and a password, and nothing else")
    return found["username"], found["password"]


def _belongs_to(repository_id: UUID) -> bytes:
    return b"password of a peer " + repository_id.bytes


def _folder(
    known: _Known, master: bytes, allowed_hosts: tuple[str, ...], *, patience_s: float = PATIENCE_S
) -> HostFolder | PeerFolder:
    """RepositoryUnreachable. A peer is not asked yet."""
    if known.peer is None:
        return HostFolder(Path(known.path or ""), is_nfs=known.kind == "nfs")
    password = _password(known, master)
    return PeerFolder(
        PeerPlace(**known.peer.model_dump(), password=password, allowed_hosts=allowed_hosts), patience_s=patience_s
    )


def _password(known: _Known, master: bytes) -> str:
    sealed = base64.b64decode(known.sealed or "")
    what = f"the password of the peer of {known.name}"
    return Keys(master).unseal(sealed, belongs_to=_belongs_to(known.id), what=what).decode()


def _shown(known: BackupRepository) -> BackupRepository:
    """Without what is sealed."""
    return BackupRepository.model_validate({name: getattr(known, name) for name in BackupRepository.model_fields})
