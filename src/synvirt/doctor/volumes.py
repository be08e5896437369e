"""Whether volumes can lie on zfs and in a Ceph pool."""

import os
import sys
from pathlib import Path

from synvirt.cage import may_open_others_files
from synvirt.doctor.finding import LOOK_TIMEOUT_S, Missing, first_line, program_path
from synvirt.programs import ProgramFailed, run
from synvirt.settings import RbdSetting, Settings, ZfsSetting
from synvirt.sizes import sized


def _mount_points(settings: Settings) -> list[Path]:
    chosen = settings.destinations.values()
    return sorted({one.mount_point for one in chosen if one.kind == "directory" and one.mount_point is not None})


def mount_points_are_set(settings: Settings) -> bool:
    return bool(_mount_points(settings))


def mounted(settings: Settings) -> str:
    """The mount points of folders with volumes. Missing: nothing is mounted there."""
    points = _mount_points(settings)
    if lacking := [str(point) for point in points if not point.is_mount()]:
        raise Missing(f"nothing is mounted at {', '.join(lacking)}")
    return ", ".join(map(str, points)) or "none is named"


# Of zpoolconcepts(7): a suspended or faulted pool lists its datasets as ever, and each write waits for good.
_TAKES_WRITES = ("ONLINE", "DEGRADED")


def _zfs_settings(settings: Settings) -> list[ZfsSetting]:
    own = [ZfsSetting(kind="zfs", pool=settings.zfs_pool, namespace=settings.zfs_namespace)] if settings.zfs_pool else []
    return own + [one for one in settings.destinations.values() if one.kind == "zfs"]


def zfs_is_set(settings: Settings) -> bool:
    return settings.destination == "zfs" or bool(_zfs_settings(settings))


def zfs_pool(settings: Settings) -> str:
    """The pools of the settings, with health and free space. Missing, also where one has lost its disks."""
    program_path("zfs")
    pools = sorted({one.pool for one in _zfs_settings(settings)})
    if not pools:
        raise Missing("no pool is set")
    health = {pool: first_line(["zpool", "list", "-H", "-o", "health,free", pool]) for pool in pools}
    found = ", ".join(f"{pool}: {' free '.join(fields.split())}" for pool, fields in health.items())
    if not all(fields.startswith(_TAKES_WRITES) for fields in health.values()):
        raise Missing(f"{found}: `zpool status` says what its disks lack, and `zpool clear` lets it go on")
    return found


def zfs_rights(settings: Settings) -> str:
    """Whether the service's user has all that it needs from `zfs allow`. Missing names each command."""
    from synvirt.destinations import zfs_allow

    user, groups = zfs_allow.caller()
    if os.geteuid() == 0:
        return "root may do all of it"
    if not _zfs_settings(settings):
        raise Missing("no pool is set")
    lacking = [
        f"`zfs allow -u {user} {','.join(lacks)} {one.pool}/{one.namespace}`"
        for one in _zfs_settings(settings)
        if (lacks := zfs_allow.missing(f"{one.pool}/{one.namespace}", user, groups))
    ]
    if zfs_allow.DEVICE_GROUP not in groups and not may_open_others_files():
        lacking.append(f"`usermod -aG {zfs_allow.DEVICE_GROUP} {user}`")
    if lacking:
        raise Missing(f"root has to call {' and '.join(lacking)}")
    return f"{user} may do all of it"


def _rbd_settings(settings: Settings) -> list[RbdSetting]:
    return [one for one in settings.destinations.values() if one.kind == "rbd"]


def rbd_is_set(settings: Settings) -> bool:
    return bool(_rbd_settings(settings))


def librbd(_: Settings) -> str:
    """Asked of a process of its own: Ceph's libraries cost 16 MiB, and most services never need them."""
    ask = "import rbd; print(*rbd.RBD().version(), sep='.')"
    try:
        return "librbd " + run([sys.executable, "-I", "-c", ask], timeout_s=LOOK_TIMEOUT_S).stdout.strip()
    except ProgramFailed as failed:
        if "ModuleNotFoundError" in failed.stderr:
            raise Missing("the Python module rbd is not installed") from failed
        raise Missing(f"the Python module rbd cannot be loaded: {failed.stderr}") from failed


def rbd_pools(settings: Settings) -> str:
    """The Ceph pools of the settings, with free space. Missing."""
    from synvirt.destinations.rbd import RbdDestination
    from synvirt.disks.specs import RbdPlace

    if not rbd_is_set(settings):
        raise Missing("no pool is set")
    librbd(settings)
    places = [RbdPlace(conf=str(one.conf), client=one.client, pool=one.pool) for one in _rbd_settings(settings)]
    free = {place.pool: RbdDestination(place).free_bytes() for place in places}
    return ", ".join(f"{pool}: {sized(there)} free" for pool, there in free.items())
