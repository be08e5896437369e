"""The folder of a service, copied as a kill would leave it at that moment."""

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

# A kernel's clock for files moves on every 10 ms at the latest.
TICK_NS = 10**7
TIMES_MAX = 100
_LOCK = type(threading.Lock())


def copy_as_killed(folder: Path, to: Path, outside: Callable[[], dict[str, Any]] = dict) -> dict[str, Any]:
    """Copies the folder; a copy of what `outside` answers, which outlives a service too, at that same moment.

    Holes stay holes. What another thread changed meanwhile would make it a state that never was: then it is copied again.
    The files in `imports` are their users', whom a job trusts to be the same file all the time: they are, in each copy.

    By a process: one that opens and closes a database of its own, for a copy, loses its locks on it (fcntl(2))."""
    for _ in range(TIMES_MAX):
        seen, before = _at_rest(folder), deepcopy(outside())
        if copy(folder, to) and _files(folder) == seen and _fields(outside()) == _fields(before):
            for path in (folder / "imports").rglob("*"):
                if path.is_file():
                    _put_link(path, to / path.relative_to(folder))
            return before
        shutil.rmtree(to, ignore_errors=True)
    raise AssertionError(f"{folder} does not rest")


def copy(folder: Path, to: Path) -> bool:
    """Whether all of it was there to the end."""
    return subprocess.run(["cp", "-a", "--reflink=auto", folder, to], stderr=subprocess.DEVNULL).returncode == 0


def _fields(value: object) -> object:
    """An object and its copy have equal ones."""
    if isinstance(value, dict):
        return {name: _fields(one) for name, one in value.items() if not isinstance(one, _LOCK)}
    is_by_identity = type(value).__eq__ is object.__eq__ and hasattr(value, "__dict__")
    return _fields(vars(value)) if is_by_identity else value


def _put_link(path: Path, to: Path) -> None:
    to.unlink()
    to.hardlink_to(path)


def _at_rest(folder: Path) -> dict[Path, tuple[int, int, int]]:
    """The files, all written longer than a tick ago: whatever is written from now on changes a time."""
    while True:
        found = _files(folder)
        if time.time_ns() - max(written_ns for _, _, written_ns in found.values()) > TICK_NS:
            return found
        time.sleep(TICK_NS / 10**9)


def _files(folder: Path) -> dict[Path, tuple[int, int, int]]:
    """Without what SQLite maps into memory (-shm), which it makes again from its log."""
    found = {}
    # `walk` leaves out a folder that is removed meanwhile, where Path.rglob raises.
    for path in (folder, *(Path(at, name) for at, folders, files in os.walk(folder) for name in (*folders, *files))):
        try:
            about = path.lstat()
        except FileNotFoundError:  # removed meanwhile: its folder says so
            continue
        if not path.name.endswith("-shm"):
            found[path] = (about.st_ino, about.st_size, about.st_mtime_ns)
    return found
