"""The service's own folder, {data_dir}: whether it can be one, and how it is made ready."""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from synvirt.durable import make_open_folder, of_another_user, sweep, user_name
from synvirt.errors import BadRequest
from synvirt.settings import Settings

# What the service keeps in {data_dir}, and in its keyring, at names of its own.
_FILES = ("synvirt.lock", "migrator.db", "migrator.db.lock")
_KEYS = ("migrator.key", "receipts.key", "tls.crt", "tls.key", "users", "sessions")
# proc(5), sysfs(5): even root can make nothing in them.
_OF_THE_KERNEL = (Path("/proc"), Path("/sys"))


def check_data_dir(settings: Settings) -> None:
    """BadRequest, if {data_dir} can be no folder of a service: a file is in its way, or its file system is read-only."""
    with _as_bad_request(settings):
        _look_where_it_would_be(settings.data_dir)


def prepare_data_dir(settings: Settings) -> None:
    """Makes {data_dir} and its folders with the modes of specification part 8, and removes what a crash left half made in the
    keyring. Idempotent. BadRequest, as in `Settings.check_host_id` and `check_data_dir`."""
    settings.check_host_id()
    check_data_dir(settings)
    with _as_bad_request(settings):
        _check_owner(settings)
        _check_kinds(settings)
        _make_data_dir(settings)
    sweep(settings.keyring_dir)


@contextmanager
def _as_bad_request(settings: Settings) -> Iterator[None]:
    """Raises an OSError of the block, which is about {data_dir}, as BadRequest."""
    try:
        yield
    except OSError as error:
        raise BadRequest(
            f"the service's folder {settings.data_dir} cannot be made ready: {error.filename}: {error.strerror}",
            hint="--data-dir, SYNVIRT_DATA_DIR or the setting data_dir names another",
        ) from error


def _look_where_it_would_be(folder: Path) -> None:
    """OSError, if no user could make and write this folder. Nothing is made, and what this user may not see passes: the
    service may be another user."""
    for at in (folder, *folder.parents):
        try:
            mode = at.stat().st_mode
        except PermissionError:
            return
        except FileNotFoundError:
            if at.is_symlink():
                raise FileExistsError(errno.EEXIST, "it is a symbolic link to nothing", str(at)) from None
            continue
        if not stat.S_ISDIR(mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(at))
        if any(at.resolve().is_relative_to(kernels) for kernels in _OF_THE_KERNEL):
            raise OSError(errno.EROFS, "the kernel's own file system, which holds no other files", str(at))
        if os.statvfs(at).f_flag & os.ST_RDONLY:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(at))
        return


def _check_kinds(settings: Settings) -> None:
    """BadRequest, if a folder, or a link to nothing, is where the service keeps a file."""
    files = (*_FILES, *(f"keyring/{name}" for name in _KEYS))
    for path in (settings.data_dir / name for name in files):
        if path.is_dir() or (path.is_symlink() and not path.exists()):
            what = "a folder" if path.is_dir() else "a symbolic link to nothing"
            raise BadRequest(f"{path} is {what}, and the service keeps a file there", hint="move it elsewhere")


def _check_owner(settings: Settings) -> None:
    """BadRequest, if another user's service was here, for example root's."""
    folders = settings.imports_dir, settings.uploads_dir, settings.keyring_dir, settings.volumes_dir, settings.receipts_dir
    files = [settings.data_dir / name for name in _FILES]
    found = of_another_user(folders, files) or of_another_user((), sorted(settings.keyring_dir.glob("*")))
    if found is not None:
        owner, ours = user_name(found.stat().st_uid), user_name(os.geteuid())
        raise BadRequest(
            f"{found} belongs to {owner}, and this runs as {ours}",
            hint=f"run it as {owner}, or once: chown -R {ours} {settings.data_dir}; --data-dir names another folder",
        )


def _make_data_dir(settings: Settings) -> None:
    if not settings.data_dir.parent.exists():
        make_open_folder(settings.data_dir.parent)  # mkdir would make it writable for all, where the umask allows that
    settings.data_dir.mkdir(exist_ok=True, mode=0o750)
    # With libvirtd, QEMU runs as another user and must reach its volumes; with the embedded driver, as the service's user.
    through = 0o001 if settings.libvirt_uri else 0
    if settings.data_dir.stat().st_uid == os.geteuid():
        settings.data_dir.chmod(stat.S_IMODE(settings.data_dir.stat().st_mode) | through)
    for folder, mode in (
        (settings.imports_dir, 0o750),
        (settings.uploads_dir, 0o750),
        (settings.keyring_dir, 0o700),
        (settings.volumes_dir, 0o750 | through),
    ):
        folder.mkdir(exist_ok=True, mode=mode)
        # A service that runs has opened the volumes to its guests' user. A command beside it must not close them again.
        passed = stat.S_IMODE(folder.stat().st_mode) & 0o001 if folder == settings.volumes_dir else 0
        folder.chmod(mode | passed)  # mkdir's mode is subject to the umask
