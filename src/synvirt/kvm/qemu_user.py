"""The user that QEMU of the embedded driver runs as if the service is root: one that may open only what libvirt gives it.

    libvirt-qemu (Debian), qemu (Fedora)   QEMU: volumes, UEFI variables and sockets are its user's while a guest runs
    tss                                    swtpm, as under the host's own libvirtd: it signs with an authority of that user

libvirt changes the owner of files, but never opens a folder to a user. So a user that cannot reach what guests need is not
chosen, and the service says why (`synvirt doctor`): a guest that does not start after its cut-over is worse than one that runs
as root. docs/decisions/0013-who-root-is.md.
"""

import contextlib
import grp
import os
import pwd
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final
from urllib.parse import parse_qs, quote, urlsplit

from synvirt.errors import Internal
from synvirt.kvm import acl, limit
from synvirt.programs import As, ProgramFailed, run
from synvirt.settings import DirectorySetting, RbdSetting, Settings

# Values of the setting qemu_user: the first known user that exists, or the service's own user.
AUTO, ROOT = "auto", "root"
USERS: Final = ("libvirt-qemu", "qemu")
TPM_USERS: Final = ("tss",)
KVM_DEVICE = Path("/dev/kvm")
# Folders of the driver that libvirt makes with the service's umask, and that QEMU and swtpm must pass.
PASSED: Final = ("cache", "cache/qemu", "lib", "lib/swtpm", "log", "run", "run/qemu")
_PASS_ALL: Final = stat.S_IXOTH
# It reads the status of some folders. A network file system that does not answer is no place for guests either.
LOOK_TIMEOUT_S = 20
# Prints the first path that this user cannot pass (x:), read (r:) or read and write (w:).
_LOOK = """
for one; do
    path=${one#?:}
    case $one in
        x:*) test -x "$path" ;;
        r:*) test -r "$path" ;;
        *) test -r "$path" && test -w "$path" ;;
    esac || { printf %s "$path"; exit 0; }
done
"""
# Ceph's names for the file of a client's key (docs.ceph.com, «keyring»), and in ceph.conf.
_KEYRING = re.compile(r"^\s*keyring\s*=\s*(\S+)", re.MULTILINE)
_KEYRINGS = ("/etc/ceph/$cluster.$name.keyring", "/etc/ceph/$cluster.keyring", "/etc/ceph/keyring")


@dataclass(frozen=True, slots=True)
class QemuUser:
    """`tpm`: the user and group of swtpm."""

    name: str
    group: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    tpm: tuple[str, str]

    def give(self, path: Path) -> None:
        """Makes the path this user's alone. OSError."""
        os.chown(path, self.uid, self.gid, follow_symlinks=False)

    def cannot_reach(self, places: Iterable[str]) -> str | None:
        """The first place that is closed to this user, by the kernel's answer: `x:`, `r:` or `w:` and a path."""
        try:
            done = run(
                ["sh", "-c", _LOOK, "sh", *places], timeout_s=LOOK_TIMEOUT_S, runs_as=As(self.uid, self.gid, self.groups)
            )
        except ProgramFailed as failed:
            return failed.detail
        return done.stdout or None


@dataclass(frozen=True, slots=True)
class Choice:
    """`user`: None, where QEMU runs as the service does. `why`: in words. `lacking`: service and QEMU both run as root, or
    QEMU's user cannot reach all it needs."""

    user: QemuUser | None
    why: str
    lacking: bool = False


def choose(settings: Settings) -> Choice:
    """Chooses by the settings and by what this host has. Changes nothing."""
    root = embedded_root(settings.hypervisor_uri)
    if root is None:
        return Choice(None, "the host's libvirtd has a user of its own for them")
    if os.geteuid() != 0:
        return Choice(None, "they run as the service's user, which is not root")
    names = USERS if settings.qemu_user == AUTO else (settings.qemu_user,)
    found = next(_accounts(names), None)
    if found is None or settings.qemu_user == ROOT:
        why = f"this host has no user {' or '.join(names)}" if found is None else "the setting qemu_user says so"
        return Choice(None, f"they run as root: {why}", lacking=True)
    return _reaching(found, found.cannot_reach(_places(settings, root)), only=settings.qemu_user != AUTO)


def _reaching(found: QemuUser, shut: str | None, *, only: bool) -> Choice:
    if shut is None:
        return Choice(found, f"they run as {found.name}, in QEMU's sandbox")
    if only:
        return Choice(found, f"they run as {found.name}, which cannot reach {shut}", lacking=True)
    return Choice(None, f"they run as root: {found.name} cannot reach {shut}", lacking=True)


def embedded_root(uri: str) -> Path | None:
    """The folder of an embedded driver; None, where the URI names another driver."""
    parts = urlsplit(uri)
    roots = parse_qs(parts.query).get("root", [])
    return Path(roots[0]) if parts.path == "/embed" and roots else None


def _accounts(names: Iterable[str]) -> Iterator[QemuUser]:
    for name in names:
        with contextlib.suppress(KeyError):
            user = pwd.getpwnam(name)
            groups = os.getgrouplist(name, user.pw_gid)
            # Debian's libvirt-qemu is in the group kvm, as people may be. So files are given to the user's own group.
            group = next((one for one in map(grp.getgrgid, groups) if one.gr_name == name), grp.getgrgid(user.pw_gid))
            tpm = next(_tpm_accounts(), (name, group.gr_name))
            yield QemuUser(name, group.gr_name, user.pw_uid, group.gr_gid, tuple(groups), tpm)


def _tpm_accounts() -> Iterator[tuple[str, str]]:
    for name in TPM_USERS:
        with contextlib.suppress(KeyError):
            yield name, grp.getgrgid(pwd.getpwnam(name).pw_gid).gr_name


def _places(settings: Settings, root: Path) -> list[str]:
    """What guests need, except the folders that `open_own` opens."""
    data_dir = settings.data_dir.resolve()
    found = [f"x:{next(path for path in data_dir.parents if path.exists())}"]
    if not root.resolve().is_relative_to(data_dir):
        found.append(f"x:{root.resolve().parent}")
    for chosen in settings.destinations_by_name.values():
        if isinstance(chosen, DirectorySetting):
            there = _there(chosen.path)
            if there is not None and not there.is_relative_to(data_dir):
                found.append(f"x:{there}")
        elif isinstance(chosen, RbdSetting):
            found += [f"r:{path}" for path in _ceph_files(chosen)]
    return found


def _there(folder: Path) -> Path | None:
    """The folder without links. None, where there is none, or nobody gets to it: its server is gone, or does not answer."""

    def look() -> Path | None:
        found = folder.resolve()
        # os.path.exists is False, too, where the server of a mount is gone.
        return found if os.path.exists(found) else None  # noqa: PTH110

    try:
        return limit.within(limit.FOLDER_ANSWERS_S, look)
    except TimeoutError:
        return None


def _ceph_files(chosen: RbdSetting) -> Iterator[Path]:
    """QEMU reads Ceph's settings, and the key of admin; the key of another client comes through libvirt (docs/ceph.md)."""
    yield chosen.conf
    if chosen.client != "admin":
        return
    try:
        named = _KEYRING.findall(chosen.conf.read_text(errors="replace"))
    except OSError:
        return
    for one in (*named, *_KEYRINGS):
        path = one.replace("$cluster", chosen.conf.stem).replace("$name", "client.admin")
        if "$" not in path and Path(path).is_file():
            yield Path(path)
            return


# ── for this process ─────────────────────────────────────────────────────────────────────────────────────────────────


@cache
def _user_of(root: Path) -> QemuUser | None:
    """For a driver that is opened without a service's settings: the user of the default settings."""
    return _with_kvm(Settings(data_dir=root.parent, libvirt_uri=f"qemu:///embed?root={quote(str(root))}")).user


_decided: dict[Path, QemuUser | None] = {}


def _with_kvm(settings: Settings) -> Choice:
    """Opens KVM's device to the chosen user. libvirt checks whether its user may open it, and asks QEMU, with more rights than
    that user's. Where the two disagree it asks QEMU again and again, for minutes."""
    made = choose(settings)
    if made.user is None or not KVM_DEVICE.exists() or made.user.cannot_reach(device := [f"w:{KVM_DEVICE}"]) is None:
        return made
    with contextlib.suppress(OSError):
        acl.let(KVM_DEVICE, made.user.uid)
    shut = made.user.cannot_reach(device)
    return made if shut is None else _reaching(made.user, shut, only=settings.qemu_user != AUTO)


def decide(settings: Settings) -> Choice:
    """Chooses for this process, before its driver is opened, and opens the service's own folders to that user."""
    made = _with_kvm(settings)
    root = embedded_root(settings.hypervisor_uri)
    if root is not None:
        _decided[root.resolve()] = made.user
    if made.user is not None:
        _close_to_others(settings.data_dir)
        open_own(settings.data_dir)
        for chosen in settings.destinations_by_name.values():
            if isinstance(chosen, DirectorySetting):
                there = _there(chosen.path)
                if there is not None and there.is_relative_to(settings.data_dir.resolve()):
                    open_own(there)
    return made


def of(uri: str) -> QemuUser | None:
    """None, where QEMU runs as this process does, or where the host's libvirtd decides."""
    root = embedded_root(uri)
    if root is None or os.geteuid() != 0:
        return None
    root = root.resolve()
    return _decided[root] if root in _decided else _user_of(root)


def in_use() -> set[int]:
    """The numbers of the users of this process's drivers."""
    return {user.uid for user in _decided.values() if user is not None}


def _close_to_others(data_dir: Path) -> None:
    """Closes what an earlier version left readable in the folder, while the folder itself was closed to others. Internal."""
    try:
        for path in data_dir.iterdir():
            found = path.lstat()
            if not stat.S_ISLNK(found.st_mode) and found.st_uid == os.geteuid() and found.st_mode & stat.S_IRWXO & ~_PASS_ALL:
                path.chmod(stat.S_IMODE(found.st_mode) & ~(stat.S_IRWXO & ~_PASS_ALL))
    except FileNotFoundError:
        return
    except OSError as error:
        raise Internal(f"{data_dir} cannot be closed to others: {error.strerror}") from error


def make(folder: Path) -> None:
    """Makes a folder for volumes. A guest's QEMU may pass all folders that had to be made. OSError."""
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True, mode=0o750)
    for path in new if os.geteuid() == 0 else ():
        open_own(path)


def open_own(folder: Path) -> None:
    """Lets others pass the folder, but not list it; a folder that root made is so already. Internal."""
    try:
        found = folder.stat()
        if found.st_uid == os.geteuid() and not found.st_mode & _PASS_ALL:
            folder.chmod(stat.S_IMODE(found.st_mode) | _PASS_ALL)
    except FileNotFoundError:
        return
    except OSError as error:
        raise Internal(f"{folder} cannot be opened to QEMU's user: {error.strerror}") from error
