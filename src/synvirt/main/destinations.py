"""Where volumes go, by the settings."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from synvirt.destinations import Destination
    from synvirt.settings import DestinationSetting, Settings


def make_destinations(settings: "Settings") -> "dict[str, Destination]":
    return {name: _destination(chosen) for name, chosen in settings.destinations_by_name.items()}


def _destination(chosen: "DestinationSetting") -> "Destination":
    from synvirt.destinations.directory import DirectoryDestination
    from synvirt.destinations.zfs import ZfsDestination
    from synvirt.disks.specs import RbdPlace
    from synvirt.kvm import qemu_user

    match chosen.kind:
        case "directory":
            qemu_user.make(chosen.path)
            return DirectoryDestination(chosen.path)
        case "zfs":
            return ZfsDestination(chosen.pool, chosen.namespace)
        case "rbd":
            from synvirt.destinations.rbd import RbdDestination

            place = RbdPlace(conf=str(chosen.conf), client=chosen.client, pool=chosen.pool)
            return RbdDestination(place)
