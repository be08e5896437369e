"""What libvirt does not hand over to QEMU's user of the embedded driver when a guest starts: the folders on the way.

libvirt makes its volumes and variables that user's, and root's again when the guest ends. A folder that the service made is
closed to all others, and so is one that libvirt makes by the service's umask. And what QEMU finds beside its disks.
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

# Who QEMU runs as under the host's own libvirtd: Debian's, then Fedora's.
QEMU_USERS: Final = ("libvirt-qemu", "qemu")


def over(xml: str, user: QemuUser, root: Path) -> None:
    """Of the domain with this definition, before it starts. DomainDefineFailed."""
    domain = parse(xml, "the domain's definition", wrong=Internal)
    try:
        for source in domain.iterfind("devices/disk/source[@file]"):
            qemu_user.open_own(Path(source.get("file", "")).parent)
        if domain.find("devices/tpm/backend[@type='emulator']") is not None:
            _tpm(root / "lib/swtpm" / (domain.findtext("uuid") or ""), user)
    except OSError as error:
        raise DomainDefineFailed(f"the guest's files cannot be given to {user.name}: {error.strerror}") from error


def to_qemu(uri: str, path: Path) -> None:
    """A file or a socket is who QEMU of that driver runs as, where that is another user than we. DiskWriteFailed."""
    own = qemu_user.of(uri)
    give(uri, path, QEMU_USERS if own is None else (own.name,))


def give(uri: str, path: Path, users: tuple[str, ...]) -> None:
    """To the first of these that there is: guests run as others than we. Not where the embedded driver's run as we do.
    DiskWriteFailed."""
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
    """Its state may be root's: a restored one, or one of a time when guests ran as root."""
    folder.mkdir(exist_ok=True)
    qemu_user.open_own(folder)
    owner, group = pwd.getpwnam(user.tpm[0]).pw_uid, grp.getgrnam(user.tpm[1]).gr_gid
    for inner in folder.iterdir():
        for path in (inner, *(inner.iterdir() if inner.is_dir() and not inner.is_symlink() else ())):
            if path.lstat().st_uid == os.geteuid():
                os.chown(path, owner, group, follow_symlinks=False)
