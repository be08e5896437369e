"""Uploads: archives that callers sent. An upload is complete, or does not exist. Blocking code.

    bytes ─▶ .uploads/.<id>/<filename>  ─ fsync ─▶ a row in the store ─▶ .uploads/<id>/<filename>

The row decides. A folder with a dot before its id is being added or removed. At the start `recover` ends what a crash has left:
with a row the upload is completed, without one it is removed. The file keeps its name, as kinds, VM names and errors use it.
"""

import errno
import hashlib
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from uuid import UUID, uuid4

import structlog

from synvirt.durable import sync_folder
from synvirt.errors import Conflict, PersistFailed, SynvirtError, UploadRejected, UploadTooLarge
from synvirt.model.files import Upload
from synvirt.model.values import now
from synvirt.repeating import repeated
from synvirt.settings import Settings
from synvirt.sizes import MIB, counted, sized
from synvirt.store.uploads import UploadRows

# Bytes that uploads always leave free: the store is on the same file system, and jobs need it.
RESERVE_BYTES = 16 * MIB
# A file system's limit on a name (NAME_MAX).
NAME_MAX_BYTES = 255
SUFFIX_MAX_BYTES = 16
SWEEP_EVERY_S = 3600.0

log = structlog.get_logger(__name__)


class Uploads:
    """The uploads of this host, in a folder of the import root. Safe from many threads."""

    def __init__(self, rows: UploadRows, settings: Settings) -> None:
        self.cap_bytes = settings.upload_cap_bytes
        self.expires_after = timedelta(days=settings.upload_expires_days)
        self.import_root = settings.imports_dir
        self._rows = rows
        self._folder = settings.uploads_dir
        self._host = settings.host_id
        # Locked while a row and its folder's name change together.
        self._moving = threading.Lock()
        # Uploads that failed, and whose rows may be there all the same: `sweep` removes them.
        self._unsure: set[UUID] = set()

    # ── coming in ────────────────────────────────────────────────────────────────────────────────────────────────────

    def free_bytes(self) -> int:
        """What uploads may still take of this host's disk."""
        try:
            found = os.statvfs(self._folder)
        except OSError as error:
            raise _not_written(error) from error
        return max(found.f_bavail * found.f_frsize - RESERVE_BYTES, 0)

    def refusal_of(self, size_bytes: int) -> UploadTooLarge | None:
        """Why a file of that size cannot be uploaded: it is over the cap, or does not fit. None: it can."""
        if size_bytes > self.cap_bytes:
            return too_large(self.cap_bytes, size_bytes)
        try:
            self.check_room(size_bytes)
        except UploadTooLarge as refusal:
            return refusal
        return None

    def check_room(self, wanted_bytes: int) -> None:
        """UploadTooLarge, when this many more bytes do not fit."""
        free = self.free_bytes()
        if wanted_bytes > free:
            raise UploadTooLarge(
                f"{sized(wanted_bytes)} more ({wanted_bytes} bytes) do not fit: uploads have {sized(free)} left on this host",
                hint=_MAKE_ROOM,
            )

    def begin(self, filename: str) -> "Incoming":
        """Begins an upload. It cannot be seen before `Incoming.finish`; `discard` removes it."""
        return Incoming(self, uuid4(), safe_name(filename))

    def publish(self, upload: Upload) -> None:
        """`Incoming.finish` calls it, once the bytes are durable."""
        try:
            sync_folder(self._folder)
            with self._moving:
                self._rows.add(upload, host=self._host)
                self.hidden(upload.id).rename(self._whole(upload.id))
        except OSError as error:
            self._take_back(upload.id)
            raise _not_written(error) from error
        except PersistFailed:  # the answer to the commit may have been lost
            self._take_back(upload.id)
            raise
        log.info("uploaded", upload=str(upload.id), filename=upload.filename, size_bytes=upload.size_bytes)

    def _take_back(self, upload_id: UUID) -> None:
        """Removes the row, now or later: it would list an upload whose bytes are gone."""
        self._unsure.add(upload_id)
        self._remove_unsure()

    def _remove_unsure(self) -> None:
        for upload_id in list(self._unsure):
            try:
                self._rows.remove(upload_id)
            except PersistFailed as error:
                log.warning("what may be listed of a failed upload is removed later", upload=str(upload_id), cause=error.detail)
                return
            self._unsure.discard(upload_id)

    def path_of(self, upload_id: UUID, filename: str) -> Path:
        return self._whole(upload_id) / filename

    def hidden(self, upload_id: UUID) -> Path:
        return self._folder / f".{upload_id}"

    def _whole(self, upload_id: UUID) -> Path:
        return self._folder / str(upload_id)

    # ── there ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def get(self, upload_id: UUID) -> Upload:
        """The upload. UploadNotFound."""
        return self._placed(self._rows.get(upload_id, host=self._host))

    def page(self, *, limit: int, cursor: int | None = None) -> tuple[list[Upload], int | None]:
        """A page of uploads, newest first, and the cursor of the next page."""
        found, following = self._rows.page(host=self._host, limit=limit, cursor=cursor)
        return [self._placed(upload) for upload in found], following

    def _placed(self, upload: Upload) -> Upload:
        """The upload with its present path, as the data folder may have been moved."""
        return upload.model_copy(update={"path": str(self.path_of(upload.id, upload.filename))})

    # ── going out ────────────────────────────────────────────────────────────────────────────────────────────────────

    def remove(self, upload_id: UUID) -> None:
        """Removes an upload. UploadNotFound; Conflict, while an unended job reads it or a member of a wave waits for that."""
        # No job that names it is added meanwhile.
        with self._rows.adding(), self._moving:
            self._rows.get(upload_id, host=self._host)
            readers = self._rows.readers(upload_id)
            if readers:
                raise Conflict(
                    f"upload {upload_id} is read by {counted(len(readers), 'job')} not ended yet: {readers[0]}",
                    hint="wait for the job's end, or cancel it",
                )
            if waves := self._rows.waves(upload_id):
                raise Conflict(
                    f"upload {upload_id} is that of a member of wave {waves[0]}, which has not ended",
                    hint="wait for its end, skip the member, or cancel the wave",
                )
            # The folder is hidden first: after a crash before the row is deleted, the upload is back, complete.
            with suppress(FileNotFoundError):  # the files were removed by hand
                self._whole(upload_id).rename(self.hidden(upload_id))
            try:
                self._rows.remove(upload_id)
            except PersistFailed:
                self._show_again(upload_id)
                raise
        _remove_folder(self.hidden(upload_id))
        log.info("upload removed", upload=str(upload_id))

    def _show_again(self, upload_id: UUID) -> None:
        """Undoes the hiding, if the row is still there. Where that cannot be seen, the next start sees to it."""
        with suppress(SynvirtError, OSError):
            self._rows.get(upload_id, host=self._host)
            self.hidden(upload_id).rename(self._whole(upload_id))

    def sweep(self) -> None:
        """Removes expired uploads. One that a job reads, or a wave will, stays until a later sweep."""
        self._remove_unsure()
        for upload in self._rows.all(host=self._host):
            if upload.expires_at <= now():
                try:
                    self.remove(upload.id)
                except SynvirtError as error:
                    log.info("an expired upload stays", upload=str(upload.id), cause=error.detail)

    def recover(self) -> None:
        """Ends what a crash has interrupted. Call it at the start, before any upload."""
        known = self._rows.ids(host=self._host)
        for entry in list(self._folder.iterdir()):
            upload_id = _hidden_id(entry.name)
            if upload_id is None:
                continue
            if upload_id in known and not self._whole(upload_id).exists():
                entry.rename(self._whole(upload_id))
            else:
                log.info("swept what is left of an upload", upload=str(upload_id))
                _remove_folder(entry)


class Incoming:
    """An upload under way: written once from start to end, and hashed meanwhile. One thread at a time."""

    def __init__(self, uploads: Uploads, upload_id: UUID, filename: str) -> None:
        self.size_bytes = 0
        self._uploads = uploads
        self._id = upload_id
        self._filename = filename
        self._digest = hashlib.sha256()
        folder = uploads.hidden(upload_id)
        try:
            folder.mkdir(mode=0o750)
            self._file = (folder / filename).open("xb", buffering=0)
        except OSError as error:
            _remove_folder(folder)
            raise _not_written(error) from error

    def write(self, data: memoryview) -> None:
        self.size_bytes += len(data)
        if self.size_bytes > self._uploads.cap_bytes:
            raise too_large(self._uploads.cap_bytes)
        self._uploads.check_room(len(data))
        self._digest.update(data)
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            raise _not_written(error) from error

    def finish(self, announced_sha256: str | None) -> Upload:
        """Makes the upload durable and lists it. UploadRejected, when the bytes are not the announced ones."""
        digest = self._digest.hexdigest()
        if announced_sha256 is not None and announced_sha256.lower() != digest:
            raise UploadRejected(
                f"{self._filename}: the SHA-256 of the {self.size_bytes} bytes that came is {digest}, "
                f"and {announced_sha256.lower()} was announced",
                hint="the file was changed on its way, or is not the announced one: send it again",
            )
        created_at = now()
        upload = Upload(
            id=self._id,
            filename=self._filename,
            size_bytes=self.size_bytes,
            sha256=digest,
            path=str(self._uploads.path_of(self._id, self._filename)),
            created_at=created_at,
            expires_at=created_at + self._uploads.expires_after,
        )
        try:
            os.fsync(self._file.fileno())
            self._file.close()
            sync_folder(self._uploads.hidden(self._id))
        except OSError as error:
            raise _not_written(error) from error
        self._uploads.publish(upload)
        return upload

    def discard(self) -> None:
        """Removes the upload, unless it is finished. Idempotent."""
        with suppress(OSError):
            self._file.close()
        _remove_folder(self._uploads.hidden(self._id))


@contextmanager
def swept(uploads: Uploads, *, every_s: float = SWEEP_EVERY_S) -> Iterator[None]:
    """Ends what a crash has left, and removes expired uploads now and every hour, while the block runs."""
    uploads.recover()

    def sweep() -> None:
        try:
            uploads.sweep()
        except SynvirtError as error:
            log.warning("uploads cannot be swept", cause=error.detail)

    with repeated(sweep, name="uploads", every_s=every_s):
        yield


def safe_name(filename: str) -> str:
    """A file name, never a path: the last part of the caller's name, with only characters that are allowed here."""
    name = filename.replace("\\", "/").rsplit("/", 1)[-1]
    name = "".join(character for character in name if character.isprintable()).strip().lstrip(". ")
    suffix = Path(name).suffix
    if len(suffix.encode()) > SUFFIX_MAX_BYTES:
        suffix = ""
    stem = name.removesuffix(suffix).encode()[: NAME_MAX_BYTES - len(suffix.encode())].decode(errors="ignore")
    return (stem + suffix).rstrip() or "upload"


def too_large(cap_bytes: int, size_bytes: int | None = None) -> UploadTooLarge:
    """The error of an upload over the cap, in bytes. `size_bytes`: the file's, where it is known."""
    limit = f"{sized(cap_bytes)} ({cap_bytes} bytes)"
    known = size_bytes is not None and f"the file has {sized(size_bytes)} ({size_bytes} bytes), and the limit is {limit}"
    return UploadTooLarge(
        known or f"the file is larger than the limit of {limit}",
        hint="raise the setting upload_cap_bytes, or copy the file into the import root by other means",
    )


_MAKE_ROOM = "remove uploads that are no longer needed, or free space on the file system of data_dir"
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def _not_written(error: OSError) -> SynvirtError:
    if error.errno in _FULL:
        return UploadTooLarge(f"the upload does not fit: {error.strerror}", hint=_MAKE_ROOM)
    return PersistFailed(f"the upload could not be written: {error.strerror}", hint="check the file system of data_dir")


def _hidden_id(name: str) -> UUID | None:
    if not name.startswith("."):
        return None
    try:
        return UUID(name[1:])
    except ValueError:
        return None


def _remove_folder(folder: Path) -> None:
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        pass
    except OSError as error:
        log.warning("cannot be removed; the next start tries again", folder=folder.name, cause=error.strerror)
