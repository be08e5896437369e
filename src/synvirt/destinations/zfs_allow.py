"""What the service's user is allowed to do with the datasets of the zfs destination: `zfs allow`, zfs-allow(8).

    ---- Permissions on tank/synvirt ---------------------------
    Permission sets:
            @volumes create,destroy
    Local+Descendent permissions:
            user synvirt @volumes,snapshot
            group disk mount
            everyone userprop

Then the same for each dataset above it. Only permissions for the dataset and all its descendants count.
"""

import grp
import os
import pwd
from collections.abc import Callable

from synvirt.destinations.zfs_command import Zfs, ZfsRefused

# All permissions that ZfsDestination needs. docs/zfs.md lists them, and a test on real zfs shows that they are enough.
NEEDED = frozenset(
    "canmount clone compression create destroy mount snapshot userprop volmode".split()  # noqa: SIM905
)
# The group that may open the devices of volumes: Debian's udev gives it all disks.
DEVICE_GROUP = "disk"
EVERYWHERE = "Local+Descendent permissions:"
SETS = "Permission sets:"


def caller() -> tuple[str, frozenset[str]]:
    """The user and the groups of this process, by the names that zfs shows."""
    return _name(os.geteuid(), lambda uid: pwd.getpwuid(uid).pw_name), frozenset(
        _name(gid, lambda gid: grp.getgrgid(gid).gr_name) for gid in {os.getegid(), *os.getgroups()}
    )


def _name(number: int, known: Callable[[int], str]) -> str:
    try:
        return known(number)
    except KeyError:
        return f"(unknown: {number})"


def missing(dataset: str, user: str, groups: frozenset[str], zfs: Callable[..., str] | None = None) -> list[str]:
    """The permissions that the user lacks for `dataset`, or for the nearest existing dataset above it. ZfsRefused."""
    ask = zfs or Zfs()
    while True:
        try:
            text = ask("allow", dataset)
            break
        except ZfsRefused as refused:
            if refused.reason != "missing" or "/" not in dataset:
                raise
            dataset = dataset.rpartition("/")[0]
    return sorted(NEEDED - _granted(text, user, groups))


def _granted(text: str, user: str, groups: frozenset[str]) -> set[str]:
    granted: set[str] = set()
    sets: dict[str, set[str]] = {}
    section = ""
    for line in text.splitlines():
        if not line.startswith("\t"):
            section = line.strip()
            continue
        # «user NAME permissions», «everyone permissions», «@set permissions»; a name may hold spaces: «(unknown: 1000)».
        who, _, permissions = line.strip().rpartition(" ")
        kind, _, name = who.partition(" ")
        if section == SETS:
            sets.setdefault(who, set()).update(permissions.split(","))
        elif section == EVERYWHERE and (
            kind == "everyone" or (kind == "user" and name == user) or (kind == "group" and name in groups)
        ):
            granted.update(permissions.split(","))
    # Sets may be defined after their use, above the dataset, and contain others. So there are as many rounds as sets.
    for _ in sets:
        granted |= {one for name in granted & sets.keys() for one in sets[name]}
    return granted
