"""The folder with a session's secrets and sockets: only the session uses it, and it is removed with it. Blocking code."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_FOLDER_PREFIX: Final = "synvirt-live-"


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """A new folder with a short path, for Unix sockets; locked while its session lasts. Removes those of killed services."""
    place = _folders()
    _sweep(place)
    folder, descriptor = _locked_folder(place)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def _locked_folder(place: Path) -> tuple[Path, int]:
    """Before it is locked, another session's cleanup may take it for a killed service's: then another is made."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_FOLDER_PREFIX, dir=place))
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if folder.exists():
                return folder, descriptor
            os.close(descriptor)


def _folders() -> Path:
    """In memory, where that is possible: secrets must not be on a disk."""
    if os.geteuid() == 0 and os.access("/run", os.W_OK):
        return Path("/run")
    return Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())


def _sweep(place: Path) -> None:
    for folder in place.glob(f"{_FOLDER_PREFIX}*"):
        with contextlib.suppress(OSError):
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)
