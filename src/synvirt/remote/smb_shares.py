"""What else is done on an SMB share: how the connection is protected, and folders that are made for us and removed again.

A platform may write a copy of a disk to a share for us (Hyper-V's ExportSystemDefinition). Nothing here reads a file's bytes.
"""

import contextlib
import posixpath
from collections.abc import Callable, Collection, Iterator
from typing import Any, Final, TypeVar

import smbprotocol.exceptions as smb
import structlog
from smbprotocol import Dialects
from smbprotocol.connection import Ciphers
from smbprotocol.file_info import FileInformationClass
from smbprotocol.open import (
    CreateDisposition,
    CreateOptions,
    DirectoryAccessMask,
    FileAttributes,
    ImpersonationLevel,
    Open,
    ShareAccess,
)

from synvirt.errors import DiskReadFailed, MalformedArchive, SourceUnreachable
from synvirt.remote import Interrupted, Remote
from synvirt.remote.retrying import retried
from synvirt.remote.smb import SmbPlace

log = structlog.get_logger(__name__)

# An export of Hyper-V has three levels, and one file per disk of the VM: at most 256.
_DEPTH_MAX, _ENTRIES_MAX = 4, 2000
_CIPHERS: Final = {
    Ciphers.AES_128_CCM: "AES-128-CCM",
    Ciphers.AES_128_GCM: "AES-128-GCM",
    Ciphers.AES_256_CCM: "AES-256-CCM",
    Ciphers.AES_256_GCM: "AES-256-GCM",
}
_DIALECTS: Final = {
    Dialects.SMB_2_0_2: "2.0.2",
    Dialects.SMB_2_1_0: "2.1",
    Dialects.SMB_3_0_0: "3.0",
    Dialects.SMB_3_0_2: "3.0.2",
    Dialects.SMB_3_1_1: "3.1.1",
}
_NOT_THERE: Final = (smb.ObjectNameNotFound, smb.ObjectPathNotFound, smb.NoSuchFile)

T = TypeVar("T")


def protection(remote: Remote) -> str:
    """The connection's dialect and protection: `SMB 3.1.1, encrypted by AES-128-GCM`. AuthFailed, NotFound,
    SourceUnreachable."""
    place = SmbPlace(remote)
    try:
        tree = place.tree()
        session, connection = tree.session, tree.session.connection
        if session.encrypt_data or tree.encrypt_data:
            # Before 3.1.1 there was only one cipher.
            guarded = f"encrypted by {_CIPHERS.get(connection.cipher_id or Ciphers.AES_128_CCM, 'its own cipher')}"
        else:
            guarded = "signed" if session.signing_required else "neither signed nor encrypted"
        return f"SMB {_DIALECTS.get(connection.dialect, hex(connection.dialect))}, {guarded}"
    except (smb.SMBException, OSError) as error:
        found = _final(place, error, "")
        if isinstance(found, Interrupted):
            raise SourceUnreachable(f"{place.shown('')} broke off: {found.cause}") from error
        raise found from error
    finally:
        place.close()


def make_folder(remote: Remote, path: str) -> None:
    """Makes the folder, and those above it, where they do not exist. AuthFailed: this user may not write there."""

    def make(place: SmbPlace) -> None:
        parts = path.strip("/").split("/")
        for count in range(1, len(parts) + 1):
            handle = _handle(
                place,
                "/".join(parts[:count]),
                DirectoryAccessMask.FILE_LIST_DIRECTORY | DirectoryAccessMask.FILE_READ_ATTRIBUTES,
                CreateDisposition.FILE_OPEN_IF,
                CreateOptions.FILE_DIRECTORY_FILE,
            )
            handle.close()

    _insisted(remote, path, make)


def files_beneath(remote: Remote, path: str) -> list[str]:
    """The files in a folder and its subfolders, as paths under the share, sorted. NotFound."""

    def files(place: SmbPlace) -> list[str]:
        return sorted(name for name, folder in _walked(place, path.strip("/"), 0) if not folder)

    return _insisted(remote, path, files)


def remove_folder(remote: Remote, path: str, endings: Collection[str]) -> None:
    """Removes the folder with all files of these endings (lower case, with their dot); does nothing where it does not exist.
    Other files stay, with their folders: Samba shows a link as its target, and we must not remove other people's files.
    DiskReadFailed: somebody has a file in it open."""

    def remove(place: SmbPlace) -> None:
        inner = path.strip("/")
        with contextlib.suppress(*_NOT_THERE):
            found = [*_walked(place, inner, 0), (inner, True)]
            others = [name for name, folder in found if not folder and posixpath.splitext(name)[1].lower() not in endings]
            if others:
                log.warning("a folder holds files that are not ours, which stay", share=remote.url, files=others[:8])
            for name, folder in found:
                if not any(other == name or other.startswith(f"{name}/") for other in others):
                    _remove(place, name, folder=folder)

    _insisted(remote, path, remove)


def _remove(place: SmbPlace, name: str, *, folder: bool) -> None:
    kind = CreateOptions.FILE_DIRECTORY_FILE if folder else CreateOptions.FILE_NON_DIRECTORY_FILE
    # Deletes a link itself, not its target.
    options = kind | CreateOptions.FILE_DELETE_ON_CLOSE | CreateOptions.FILE_OPEN_REPARSE_POINT
    try:
        _handle(place, name, DirectoryAccessMask.DELETE, CreateDisposition.FILE_OPEN, options).close()
    except _NOT_THERE:
        return


def _walked(place: SmbPlace, path: str, depth: int) -> Iterator[tuple[str, bool]]:
    """All entries in the folder, a subfolder after its content: (path, is it a folder). A link counts as no folder."""
    if depth > _DEPTH_MAX:
        raise MalformedArchive(f"{place.shown(path)} lies deeper than an export does")
    for name, attributes in _entries(place, path):
        link = bool(attributes & FileAttributes.FILE_ATTRIBUTE_REPARSE_POINT)
        folder = bool(attributes & FileAttributes.FILE_ATTRIBUTE_DIRECTORY)
        if folder and not link:
            yield from _walked(place, f"{path}/{name}", depth + 1)
        yield f"{path}/{name}", folder


def _entries(place: SmbPlace, path: str) -> list[tuple[str, int]]:
    access = DirectoryAccessMask.FILE_LIST_DIRECTORY | DirectoryAccessMask.FILE_READ_ATTRIBUTES
    handle = _handle(place, path, access, CreateDisposition.FILE_OPEN, CreateOptions.FILE_DIRECTORY_FILE)
    found: list[tuple[str, int]] = []
    while True:
        try:
            page = handle.query_directory("*", FileInformationClass.FILE_DIRECTORY_INFORMATION, 0)
        except smb.NoMoreFiles:
            break
        for entry in page:
            name = entry["file_name"].get_value().decode("utf-16-le", "surrogatepass")
            if name not in (".", ".."):
                found.append((name, int(entry["file_attributes"].get_value())))
        if len(found) > _ENTRIES_MAX:
            raise MalformedArchive(f"{place.shown(path)} has over {_ENTRIES_MAX} entries; no export has")
    handle.close()
    return found


def _handle(place: SmbPlace, path: str, access: int, disposition: int, options: int) -> Open:
    place.refuse_no_name(path)
    handle = Open(place.tree(), path.replace("/", "\\"))
    shared = ShareAccess.FILE_SHARE_READ | ShareAccess.FILE_SHARE_WRITE | ShareAccess.FILE_SHARE_DELETE
    attributes = FileAttributes.FILE_ATTRIBUTE_NORMAL
    handle.create(ImpersonationLevel.Impersonation, access, attributes, shared, disposition, options)
    return handle


def _insisted(remote: Remote, path: str, use: Callable[[SmbPlace], T]) -> T:
    """Tries again if the connection breaks: `use` must allow that all of it is done twice."""
    place = SmbPlace(remote)

    def attempt() -> T:
        try:
            return use(place)
        except (smb.SMBException, OSError) as error:
            raise _final(place, error, path) from error

    try:
        return retried(attempt, place.shown(path))
    finally:
        place.close()


def _final(place: SmbPlace, error: Exception, path: str) -> Any:
    if isinstance(error, (smb.SharingViolation, smb.CannotDelete)):
        return DiskReadFailed(f"{place.shown(path)}: somebody has a file of it open", hint="it is tried again later")
    return place.translated(error, path, tree=place.connected)
