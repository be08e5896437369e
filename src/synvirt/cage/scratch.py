"""Temporary folders: for sockets, secrets, and what programs write. Blocking code.

A folder is locked while its process uses it. The lock ends with the process, so an unlocked folder is one that a killed process
left, and it is removed by the next start of a service.
"""

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from synvirt.cage.confining import Cage, cage_user, may_change_user

# What the name of a folder ends with that is locked from the moment it can be used.
_LOCKED: Final = ".held"
# What mkdtemp(3) draws.
_DRAWN: Final = "[a-z0-9_]{8}"
# The kinds of folders that versions without locks made. A conversion, which lasts longest, ends after an hour.
_UNLOCKED: Final = re.compile(rf"synvirt-(?:live|look|mount|qcow2|qemu-iscsi|qemu-nbd|stamp|v2v|vddk|vmcx)-{_DRAWN}")
_UNLOCKED_KEPT_S: Final = 86400


@contextlib.contextmanager
def scratch_folder(kind: str, place: Path | None = None) -> Iterator[Path]:
    """A new folder for this user only, which is removed at the end of the block. `place`: the folder above it; None: the
    system's for temporary files."""
    folder, lock = _locked_folder(f"synvirt-{kind}-", Path(tempfile.gettempdir()) if place is None else place)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _locked_folder(prefix: str, place: Path) -> tuple[Path, int]:
    """Before it is locked, a sweep may take it for a killed process's: then another is made."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, suffix=_LOCKED, dir=place))
        with contextlib.suppress(FileNotFoundError):
            lock = _opened(folder)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if folder.exists():
                return folder, lock
            os.close(lock)


def housed(cage: Cage) -> Cage:
    """The cage with a temporary folder of this process alone, if it needs one: in the system's, it could read other jobs'
    secrets and write what the service runs. From now on this process's temporary files are made there. The folder is locked
    until this process ends; then `sweep_of` removes it, as the process itself may not, in its cage."""
    if not cage.temporary:
        return cage
    folder, _ = _locked_folder(f"synvirt-{_kind_of(os.getpid())}-", Path(tempfile.gettempdir()))
    tempfile.tempdir = os.environ["TMPDIR"] = str(folder)
    return replace(cage, writes=(*cage.writes, str(folder)))


def sweep_of(process: int) -> None:
    """Removes the temporary folder of a process that was in a cage, and has ended."""
    sweep(kind=_kind_of(process))


def _kind_of(process: int) -> str:
    return f"cage-{process}"


def sweep(place: Path | None = None, kind: str = "[a-z0-9-]+") -> None:
    """Removes what killed processes of this user, and of the user of its cages, left in `place`. `kind`: a regular expression.
    A folder that cannot be removed stays."""
    held = re.compile(rf"synvirt-(?:{kind})-{_DRAWN}{re.escape(_LOCKED)}")
    users = {os.geteuid(), *([cage_user()[0]] if may_change_user() else [])}
    with contextlib.suppress(OSError), os.scandir(tempfile.gettempdir() if place is None else place) as found:
        for entry in found:
            if held.fullmatch(entry.name):
                _remove_unlocked(Path(entry.path), users)
            elif _UNLOCKED.fullmatch(entry.name):
                _remove_unlocked(Path(entry.path), users, older_than=time.time() - _UNLOCKED_KEPT_S)


def _remove_unlocked(folder: Path, users: set[int], *, older_than: float = float("inf")) -> None:
    with contextlib.suppress(OSError):
        lock = _opened(folder)
        try:
            status = os.fstat(lock)
            if status.st_uid in users and status.st_mtime < older_than:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)


def _opened(folder: Path) -> int:
    """A descriptor of the folder. OSError: it has gone, or is something else, for example a link."""
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
