"""What the tests in the guest share: a destination in the pool `tank`, and a look at what is in it."""

import itertools
import subprocess
from uuid import UUID

from synvirt.destinations.zfs import ZfsDestination

POOL = "tank"
_numbers = itertools.count(1)


def zfs(*arguments: str) -> str:
    return subprocess.run(["zfs", *arguments], check=True, capture_output=True, text=True).stdout


def new_destination(pool: str = POOL) -> ZfsDestination:
    """In a namespace of its own, two deep, that is not there yet."""
    return ZfsDestination(pool, f"vms/test{next(_numbers)}")


def volumes(destination: ZfsDestination) -> list[str]:
    """All that lies below the folder of jobs."""
    folder = root(destination)
    # Of this one alone: other tests leave theirs, and each takes a moment to list.
    argv = ["zfs", "list", "-Hp", "-o", "name", "-rt", "all", folder]
    done = subprocess.run(argv, check=False, capture_output=True, text=True)
    assert done.returncode == 0 or "dataset does not exist" in done.stderr, done.stderr
    return [name for name in done.stdout.split() if name != folder]


def root(destination: ZfsDestination) -> str:
    return destination.volume_name(UUID(int=0), "x").rsplit("/", 2)[0]


def prop(dataset: str, name: str) -> str:
    return zfs("get", "-Hp", "-o", "value", name, dataset).strip()


def used_bytes(volume: str) -> int:
    """What the volume takes, once what was written and freed has reached the pool."""
    subprocess.run(["zpool", "sync"], check=True)
    return int(prop(volume, "used"))
