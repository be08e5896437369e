"""What the tests in the guest share: a destination in the pool `tank`, and a look at what is in it."""

import itertools
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import UUID

from synvirt.destinations.zfs import ZfsDestination
from synvirt.disks.raw.zvols import device_of

POOL = "tank"
_numbers = itertools.count(1)


def zfs(*arguments: str) -> str:
    return subprocess.run(["zfs", *arguments], check=True, capture_output=True, text=True).stdout


def in_a_child(does: Callable[[], object]) -> str:
    """What is said by a process of its own that does it, an exception's traceback too. It is forked: a new Python takes ten
    seconds of a processor here to begin."""
    reading_end, writing_end = os.pipe()
    child = os.fork()
    if child == 0:
        for standard in (1, 2):
            os.dup2(writing_end, standard)
        sys.stdout = sys.stderr = os.fdopen(writing_end, "w")
        try:
            does()
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(0)
    os.close(writing_end)
    with os.fdopen(reading_end) as lines:
        text = lines.read()
    os.waitpid(child, 0)
    return text


@contextmanager
def small_pool(name: str, image: Path) -> Iterator[None]:
    """Of the least size that zpool takes, half of which can be used; others have reserved the most of that."""
    image.touch()
    os.truncate(image, 64 << 20)
    subprocess.run(["zpool", "create", "-m", "none", name, str(image)], check=True)
    try:
        zfs("create", "-o", "reservation=16M", f"{name}/theirs")
        yield
    finally:
        # A volume that was just destroyed is let go of a moment later.
        while subprocess.run(["zpool", "destroy", name], capture_output=True).returncode:
            time.sleep(0.5)


def new_destination(pool: str = POOL) -> ZfsDestination:
    """In a namespace of its own, two deep, that is not there yet."""
    return ZfsDestination(pool, f"vms/test{next(_numbers)}")


def content(device: str) -> bytes:
    """What the device has. The link to it may be away for a moment: udev looks at a device anew that was written to."""
    return Path(device_of(device)).read_bytes()


def volumes(destination: ZfsDestination, kinds: str = "all") -> list[str]:
    """All of these kinds that lies below the folder of jobs."""
    folder = root(destination)
    return [name for name in below(folder, kinds) if name != folder]


def below(folder: str, kinds: str = "all") -> list[str]:
    """All of these kinds, the folder itself too; empty, where there is none."""
    # Of this one alone: other tests leave theirs, and each takes a moment to list.
    argv = ["zfs", "list", "-Hp", "-o", "name", "-rt", kinds, folder]
    done = subprocess.run(argv, check=False, capture_output=True, text=True)
    assert done.returncode == 0 or "dataset does not exist" in done.stderr, done.stderr
    return done.stdout.split()


def root(destination: ZfsDestination) -> str:
    return destination.volume_name(UUID(int=0), "x").rsplit("/", 2)[0]


def prop(dataset: str, name: str) -> str:
    return zfs("get", "-Hp", "-o", "value", name, dataset).strip()


def used_bytes(volume: str) -> int:
    """What the volume takes, once what was written and freed has reached the pool."""
    subprocess.run(["zpool", "sync"], check=True)
    return int(prop(volume, "used"))
