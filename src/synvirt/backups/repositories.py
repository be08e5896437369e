"""The repositories that this host knows: their places, and their keys, one file for each in {data_dir}/keyring."""

import base64
import contextlib
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import UUID, uuid4

from pydantic import SecretStr

from synvirt.backups.authors import Authors
from synvirt.backups.model import (
    BackupPeer,
    BackupRepository,
    BackupRepositoryChange,
    BackupRepositoryRequest,
    SealedKeyRequest,
)
from synvirt.durable import put_private_file, sync_folder
from synvirt.errors import BackupBadRequest, BackupConflict, PersistFailed, RepositoryKeyWrong, SynvirtError
from synvirt.keyring import migrator_key
from synvirt.model.access import Credentials, in_words_of
from synvirt.model.values import now
from synvirt.repository import repository as stored
from synvirt.repository import sealed_key
from synvirt.repository.folder import HostFolder
from synvirt.repository.keys import KEY_BYTES, KeyRing, Keys, from_recovery_text, new_key, recovery_text
from synvirt.repository.manifest import HERE, Reading
from synvirt.repository.peer import PATIENCE_S, PeerFolder, PeerPlace
from synvirt.repository.repository import Repository
from synvirt.repository.specs import FolderSpec, PeerSpec, RepositorySpec
from synvirt.store.backups import BackupRows
from synvirt.store.documents import parsed, readable


class _Known(BackupRepository):
    """The stored form. `sealed`: the password of a peer's account, in base64, sealed with the repository's key."""

    sealed: str | None = None


# Refuses a change that was made from an earlier state, by what is `stored`.
Check = Callable[[BackupRepository, bytes], None]


def unchecked(_: BackupRepository, __: bytes) -> None:
    """For a change that was made from no answer."""


class Repositories:
    """`caches`: a folder for copies of parts of repositories, so that they are not fetched again; None: no copies.
    `allowed_hosts`: where peers may be, as in the setting source_allowed_hosts. `authors`: signs points and knows authors;
    None: no signatures. `reading`: parses the content of manifests."""

    def __init__(
        self,
        rows: BackupRows,
        *,
        host: str,
        keyring: Path,
        caches: Path | None = None,
        allowed_hosts: tuple[str, ...] = (),
        authors: Authors | None = None,
        reading: Reading = HERE,
    ) -> None:
        self.authors = authors or Authors()
        self._rows, self._host, self._keyring, self._caches = rows, host, keyring, caches
        self._allowed_hosts, self._reading = allowed_hosts, reading
        self._open: dict[UUID, Repository] = {}
        # A repository whose server hangs must not keep others from being opened: so each has its own.
        self._locks = defaultdict[UUID, threading.Lock](threading.Lock)
        self._changing = defaultdict[UUID, threading.RLock](threading.RLock)
        # The names and places of those that are being added: to make one may take as long as its server does.
        self._adding: set[str] = set()
        self._claiming = threading.Lock()

    def add(self, asked: BackupRepositoryRequest) -> BackupRepository:
        """Adds a new one in an empty folder, or an existing one by its recovery key. BackupConflict, RepositoryUnreachable,
        RepositoryKeyWrong, RepositoryDamaged."""
        master = new_key() if asked.recovery_key is None else _given(asked.recovery_key, asked.passphrase)
        made = _made(asked, master)
        password = "" if asked.peer is None else _credentials(asked.peer.credentials)[1]
        folder = _folder(made, password, self._allowed_hosts)
        with self._claimed(made), contextlib.ExitStack() as stack:
            if asked.recovery_key is not None:
                with contextlib.closing(Repository(folder, master)) as existing:
                    stack.enter_context(self._sole(existing.id))
            self._write_key(self._key_path(made.id), master)  # before anything is sealed with it
            try:
                # Before the repository: where this fails, nobody would have the key of what is in the folder.
                self._rows.put("repository", made.id, made, host=self._host)
                with contextlib.closing(folder):
                    if asked.recovery_key is None:
                        stored.create(folder, master)
            except SynvirtError:
                with contextlib.suppress(SynvirtError):
                    self._rows.remove("repository", made.id, host=self._host)
                self._key_path(made.id).unlink(missing_ok=True)
                raise
        return self.shown(made)

    def stored(self, repository_id: UUID) -> tuple[BackupRepository, bytes]:
        """The repository, and what is sealed of it: both change with `change`. BackupNotFound."""
        return _stored(self._known(repository_id))

    def change(self, repository_id: UUID, asked: BackupRepositoryChange, check: Check) -> BackupRepository:
        """Renames it, or says where it lies now, once what lies there opens with its key. `check` gets what is `stored`, and
        may refuse. BackupBadRequest, BackupConflict, RepositoryUnreachable, RepositoryKeyWrong, RepositoryDamaged."""
        with self._changing[repository_id]:
            before, keys = self._known(repository_id), self._keys(repository_id)
            check(*_stored(before))
            made, password = self._changed(before, asked, keys[0])
            with self._claimed(made):
                if (made.path, made.peer, made.sealed) != (before.path, before.peer, before.sealed):
                    with contextlib.closing(_folder(made, password, self._allowed_hosts, patience_s=0)) as folder:
                        stored.check_key(folder, keys)
                self._rows.put("repository", made.id, made, host=self._host)
            self._reopened(repository_id)
        return self.shown(made)

    def _changed(self, before: _Known, asked: BackupRepositoryChange, key: bytes) -> tuple[_Known, str]:
        """The repository after the change, and the password of its peer."""
        made, peer = before.model_copy(update={"name": asked.name or before.name}), before.peer
        if (asked.path if peer is not None else asked.peer) is not None:
            raise BackupBadRequest(f"the repository {before.name} is of kind {before.kind}, and its kind stays")
        if peer is None:
            return made.model_copy(update={"path": asked.path or before.path}), ""
        password = self._password(before)
        if asked.peer is None:
            return made, password
        new = asked.peer.model_dump(include={"url", "fingerprint_sha256"}, exclude_none=True)
        if "url" in new:
            new["url"] = new["url"].rstrip("/")
        if asked.peer.credentials is not None:
            new["username"], password = _credentials(asked.peer.credentials)
        elif new.get("url", peer.url) != peer.url:
            raise BackupBadRequest(
                "peer.credentials: are required with another peer.url",
                hint="what was sealed for one host is not sent to another",
            )
        sealed = _sealed(key, before.id, password)
        return made.model_copy(update={"peer": peer.model_copy(update=new), "sealed": sealed}), password

    @contextlib.contextmanager
    def _claimed(self, made: _Known) -> Iterator[None]:
        """Within the block nobody else adds one of this name or place. BackupConflict, where there is another already."""
        claims = {f"name {made.name}", f"place {made.place}"}
        with self._claiming:
            known = [one for one in self.known() if one.id != made.id]
            if any(one.name == made.name or one.place == made.place for one in known) or claims & self._adding:
                raise BackupConflict(f"a repository is named {made.name!r} or lies at {made.place} already")
            self._adding |= claims
        try:
            yield
        finally:
            with self._claiming:
                self._adding -= claims

    @contextlib.contextmanager
    def _sole(self, stored_id: UUID) -> Iterator[None]:
        """Within the block nobody else adds the repository with this id in its header. BackupConflict, where it is known
        already: by a symlink, another mount or another name of its server. Each point would be shown under one of the names.
        One that does not answer now is not known by its id."""
        claim = f"id {stored_id}"
        with self._claiming:
            if claim in self._adding:
                raise BackupConflict("this repository is being added at this moment, under another name")
            self._adding.add(claim)
        try:
            for other in self.known():
                if self._stored_id(other.id) == stored_id:
                    raise BackupConflict(
                        f"this repository is known as {other.name} already, at {other.place}, or is a copy of that one",
                        hint=f"use {other.name}; or forget that first, and add this one then",
                    )
            yield
        finally:
            with self._claiming:
                self._adding.discard(claim)

    def _stored_id(self, repository_id: UUID) -> UUID | None:
        """The id in the header of a known repository; None, if it does not answer at once."""
        with contextlib.suppress(SynvirtError), contextlib.closing(self._folder_of(repository_id, patience_s=0)) as folder:
            return UUID(stored.header_of(folder)["id"])
        return None

    def points_in(self, repository_id: UUID) -> set[UUID]:
        """The ids of its points, by a folder that answers at once. RepositoryUnreachable and others, as of `opened`."""
        with contextlib.closing(self._folder_of(repository_id, patience_s=0)) as folder:
            folder.room()
        return set(self.opened(repository_id).point_ids())

    def get(self, repository_id: UUID) -> BackupRepository:
        return _shown(self._known(repository_id))

    def _known(self, repository_id: UUID) -> "_Known":
        return parsed(_Known, self._rows.get("repository", repository_id, host=self._host))

    def page(self, *, limit: int, cursor: int | None) -> tuple[list[BackupRepository], int | None]:
        """A page of at most `limit` repositories, newest first, and the cursor of the next page; None: it was the last."""
        texts, following = self._rows.page("repository", host=self._host, limit=limit, cursor=cursor)
        return [self.shown(one) for one in readable(_Known, texts)], following

    def known(self) -> list[BackupRepository]:
        """All in the order in which they were added, without opening them, so that no call waits for one."""
        return [*readable(_Known, self._rows.all("repository", host=self._host))]

    def shown(self, known: BackupRepository) -> BackupRepository:
        """The repository with its present content."""
        try:
            with contextlib.closing(self._folder_of(known.id, patience_s=0)) as folder:
                capacity, used = folder.room()
            count = len(self.opened(known.id).point_ids())
        except SynvirtError as error:
            return _shown(known).model_copy(update={"state": "unreachable", "problem": error.detail})
        return _shown(known).model_copy(update={"capacity_bytes": capacity, "used_bytes": used, "points_count": count})

    def opened(self, repository_id: UUID) -> Repository:
        """Opens it. Its folder is checked first: a missing NFS mount must not look like an empty folder."""
        self._settled(repository_id)
        with self._locks[repository_id]:
            opened = self._open.get(repository_id)
            if opened is None:
                cache = None if self._caches is None else self._caches / f"{repository_id}.footers"
                opened = Repository(
                    self._folder_of(repository_id), self._key(repository_id), cache=cache, reading=self._reading
                )
                self._open[repository_id] = opened
            elif isinstance(opened.folder, HostFolder):
                opened.folder.check()
            return opened

    def spec(self, repository_id: UUID) -> RepositorySpec:
        """The spec for a worker, which opens the repository itself: it contains the key."""
        self._settled(repository_id)
        known, master = self._known(repository_id), self._key(repository_id)
        place: FolderSpec | PeerSpec = FolderSpec(path=known.path or "", nfs=known.kind == "nfs")
        if known.peer is not None:
            place = PeerSpec(**known.peer.model_dump(), password=self._password(known), allowed_hosts=self._allowed_hosts)
        cache = None if self._caches is None else str(self._caches / f"{repository_id}.footers")
        return RepositorySpec(place=place, key=base64.b64encode(master).decode(), cache=cache)

    def _folder_of(self, repository_id: UUID, *, patience_s: float = PATIENCE_S) -> HostFolder | PeerFolder:
        known = self._known(repository_id)
        password = "" if known.peer is None else self._password(known)
        return _folder(known, password, self._allowed_hosts, patience_s=patience_s)

    def _password(self, known: _Known) -> str:
        """The password of a peer's account."""
        ring, what = KeyRing(self._keys(known.id)), f"the password of the peer of {known.name}"
        return ring.unseal(base64.b64decode(known.sealed or ""), belongs_to=_belongs_to(known.id), what=what).decode()

    def _keys(self, repository_id: UUID) -> list[bytes]:
        """The key, and the next key of a change that a crash interrupted."""
        following = [self._next_path(repository_id)] if self._has_next(repository_id) else []
        return [_kept_key(path) for path in (self._key_path(repository_id), *following)]

    def _key(self, repository_id: UUID) -> bytes:
        return _kept_key(self._key_path(repository_id))

    def change_key(self, repository_id: UUID) -> str:
        """Changes the key: returns the new recovery key, and all is written with the new key from now on. After a crash, the
        next call, or the next opening, finishes the change. RepositoryUnreachable, RepositoryKeyWrong."""
        self.get(repository_id)
        following = self._next_path(repository_id)
        with self._changing[repository_id]:
            self._key(repository_id)  # without it the change could only wait for it, and happen at some later time
            if not self._has_next(repository_id):
                self._write_key(following, new_key())
            self._end_change(repository_id)
        return self.recovery_key(repository_id)

    def _end_change(self, repository_id: UUID) -> None:
        path, following = self._key_path(repository_id), self._next_path(repository_id)
        old, new = _kept_key(path), _kept_key(following)
        known = self._known(repository_id)
        with contextlib.closing(self._folder_of(repository_id)) as folder:
            stored.change_key(folder, old, new)
        if known.peer is not None:
            known = known.model_copy(update={"sealed": _sealed(new, known.id, self._password(known))})
            self._rows.put("repository", known.id, known, host=self._host)
        # The old key stays, for a copy of the repository from before the change.
        with contextlib.suppress(FileExistsError):
            os.link(path, path.with_name(f"{path.name}.before-{Keys(new).check[:16]}"))
        following.replace(path)
        sync_folder(path.parent)
        self._reopened(repository_id)

    def _reopened(self, repository_id: UUID) -> None:
        """The next use opens it again. A run that still reads from it may go on."""
        with self._locks[repository_id]:
            opened = self._open.pop(repository_id, None)
        if opened is not None:
            opened.folder.close()

    def _settled(self, repository_id: UUID) -> None:
        """Finishes a change of the key that a crash interrupted."""
        with self._changing[repository_id]:
            if self._has_next(repository_id):
                self._end_change(repository_id)

    def _has_next(self, repository_id: UUID) -> bool:
        """Whether there is a next key. An incomplete one was never used, and is removed."""
        following = self._next_path(repository_id)
        if following.exists() and following.stat().st_size != KEY_BYTES:
            following.unlink()
        return following.exists()

    def recovery_key(self, repository_id: UUID) -> str:
        """The repository's key as a text for people. BackupNotFound."""
        self.get(repository_id)
        return recovery_text(self._key(repository_id))

    def sealed_copy(self, repository_id: UUID, asked: SealedKeyRequest) -> str:
        """BackupBadRequest, if the passphrase is too short, or this host cannot seal in that way."""
        self.get(repository_id)
        master = self._key(repository_id)
        if asked.passphrase is not None:
            return sealed_key.by_passphrase(master, asked.passphrase.get_secret_value())
        return sealed_key.by_this_host(master, asked.bound_to or "host")

    def forget(self, repository_id: UUID) -> None:
        """The folder's content and the key stay."""
        self._rows.remove("repository", repository_id, host=self._host)
        self._reopened(repository_id)

    def close(self) -> None:
        """Call it when nothing reads or writes any more."""
        opened, self._open = list(self._open.values()), {}
        for repository in opened:
            repository.close()

    def _key_path(self, repository_id: UUID) -> Path:
        return self._keyring / f"backup-{repository_id}.key"

    def _next_path(self, repository_id: UUID) -> Path:
        return self._keyring / f"backup-{repository_id}.key.new"

    def _write_key(self, path: Path, master: bytes) -> None:
        try:
            put_private_file(path, master, replace=False)
        except OSError as error:
            raise PersistFailed(
                f"the repository's key cannot be kept: {error.strerror}",
                hint="look at the free space and the permissions of data_dir",
            ) from error


def _kept_key(path: Path) -> bytes:
    """The key in the file. RepositoryKeyWrong, if it is gone: another one, made in its place, opens nothing, and would be
    handed out as the recovery key."""
    if not os.path.lexists(path):
        raise RepositoryKeyWrong(
            f"the key of the repository is lost here: there is no {path.name} in keyring of the service's folder",
            hint="put that file back from a copy of the keyring; or remove the jobs of the repository, forget it, and add it "
            "again with its recovery key",
        )
    return migrator_key(path)


def _given(text: str, passphrase: SecretStr | None) -> bytes:
    """The key from the request. RepositoryKeyWrong, BackupBadRequest."""
    if sealed_key.is_sealed(text):
        return sealed_key.opened(text, "" if passphrase is None else passphrase.get_secret_value())
    return from_recovery_text(text)


def _made(asked: BackupRepositoryRequest, master: bytes) -> _Known:
    """The folder or peer of the request. BackupBadRequest."""
    made = _Known(id=uuid4(), name=asked.name, kind=asked.kind, path=asked.path, created_at=now())
    if asked.peer is None:
        return made
    username, password = _credentials(asked.peer.credentials)
    peer = BackupPeer(url=asked.peer.url.rstrip("/"), fingerprint_sha256=asked.peer.fingerprint_sha256, username=username)
    return made.model_copy(update={"peer": peer, "sealed": _sealed(master, made.id, password)})


def _sealed(master: bytes, repository_id: UUID, password: str) -> str:
    return base64.b64encode(Keys(master).seal(password.encode(), belongs_to=_belongs_to(repository_id))).decode()


def _credentials(asked: Credentials) -> tuple[str, str]:
    takes = {"username", "password"}
    found = in_words_of(takes, {name: secret.get_secret_value() for name, secret in asked.items()})
    if found.keys() != takes:
        raise BackupBadRequest("peer.credentials: has a username and a password, and nothing else")
    return found["username"], found["password"]


def _belongs_to(repository_id: UUID) -> bytes:
    return b"password of a peer " + repository_id.bytes


def _folder(
    known: _Known, password: str, allowed_hosts: tuple[str, ...], *, patience_s: float = PATIENCE_S
) -> HostFolder | PeerFolder:
    """Opens the folder. RepositoryUnreachable. A peer is not contacted yet."""
    if known.peer is None:
        return HostFolder(Path(known.path or ""), is_nfs=known.kind == "nfs")
    return PeerFolder(
        PeerPlace(**known.peer.model_dump(), password=password, allowed_hosts=allowed_hosts), patience_s=patience_s
    )


def _shown(known: BackupRepository) -> BackupRepository:
    """The repository without sealed fields."""
    return BackupRepository.model_validate({name: getattr(known, name) for name in BackupRepository.model_fields})


def _stored(known: _Known) -> tuple[BackupRepository, bytes]:
    return _shown(known), (known.sealed or "").encode()
