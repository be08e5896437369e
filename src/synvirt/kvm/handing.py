"""Hands over to the embedded driver's QEMU user what libvirt does not hand over when a guest starts: the folders on the way.

libvirt gives its volumes and variables to that user, and back to root when the guest ends. A folder that the service made is
closed to all others, and so is one that libvirt makes with the service's umask. Files that QEMU finds beside its disks need the
same.
"""

import contextlib
import grp
import os
import pwd
import shutil
from pathlib import Path
from typing import Final

from synvirt.errors import DiskWriteFailed, DomainDefineFailed, Internal
from synvirt.kvm import qemu_user
from synvirt.kvm.qemu_user import QemuUser, embedded_root
from synvirt.xml_document import parse

# QEMU's user under the host's own libvirtd: Debian's, then Fedora's.
QEMU_USERS: Final = ("libvirt-qemu", "qemu")


def over(xml: str, user: QemuUser, root: Path) -> None:
    """For the domain with this definition, before it starts. DomainDefineFailed."""
    domain = parse(xml, "the domain's definition", wrong=Internal)
    try:
        for source in domain.iterfind("devices/disk/source[@file]"):
            qemu_user.open_own(Path(source.get("file", "")).parent)
        if domain.find("devices/tpm/backend[@type='emulator']") is not None:
            _tpm(root / "lib/swtpm" / (domain.findtext("uuid") or ""), user)
    except OSError as error:
        raise DomainDefineFailed(f"the guest's files cannot be given to {user.name}: {error.strerror}") from error


def to_qemu(uri: str, path: Path) -> None:
    """Gives a file or a socket to the user that QEMU of that driver runs as, if it is another user than ours.
    DiskWriteFailed."""
    own = qemu_user.of(uri)
    give(uri, path, QEMU_USERS if own is None else (own.name,))


def give(uri: str, path: Path, users: tuple[str, ...]) -> None:
    """Gives the file to the first of these users that exists, as guests run as another user than we do. Does nothing where the
    embedded driver's guests run as we do. DiskWriteFailed."""
    if embedded_root(uri) is not None and qemu_user.of(uri) is None:
        return
    for user in users:
        with contextlib.suppress(LookupError):
            try:
                shutil.chown(path, user)
            except OSError as error:
                raise DiskWriteFailed(f"{path.name} cannot be given to {user}: {error.strerror}") from error
            return


def _tpm(folder: Path, user: QemuUser) -> None:
    """The TPM's state may be root's: a restored one, or one from a time when guests ran as root."""
    folder.mkdir(exist_ok=True)
    qemu_user.open_own(folder)
    owner, group = pwd.getpwnam(user.tpm[0]).pw_uid, grp.getgrnam(user.tpm[1]).gr_gid
    for inner in folder.iterdir():
        for path in (inner, *(inner.iterdir() if inner.is_dir() and not inner.is_symlink() else ())):
            if path.lstat().st_uid == os.geteuid():
                os.chown(path, owner, group, follow_symlinks=False)
