"""The destinations that the settings name. The service makes them at its start, and `synvirt config check` earlier."""

from synvirt.destinations import Destination
from synvirt.destinations.directory import DirectoryDestination
from synvirt.destinations.zfs import ZfsDestination
from synvirt.disks.specs import RbdPlace
from synvirt.errors import BadRequest, DiskWriteFailed
from synvirt.settings import DestinationSetting, Settings


def destinations(settings: Settings, *, shut_out: bool = False) -> dict[str, Destination]:
    """By their names, the default first. Nothing is made. BadRequest: no dataset and no image can have the name of a setting.

    `shut_out`: whether this process may not open guests' files while they run.
    """
    return {name: _named(settings, name, chosen, shut_out) for name, chosen in settings.destinations_by_name.items()}


def _named(settings: Settings, name: str, chosen: DestinationSetting, shut_out: bool) -> Destination:
    try:
        return _destination(chosen, shut_out)
    except DiskWriteFailed as error:
        setting = f"destinations_{name}" if name in settings.destinations else "zfs_pool"
        raise BadRequest(f"setting {setting}: {error.detail}", hint=error.hint) from error


def _destination(chosen: DestinationSetting, shut_out: bool) -> Destination:
    match chosen.kind:
        case "directory":
            return DirectoryDestination(chosen.path, mount_point=chosen.mount_point, shut_out=shut_out)
        case "zfs":
            return ZfsDestination(chosen.pool, chosen.namespace)
        case "rbd":
            from synvirt.destinations.rbd import RbdDestination

            return RbdDestination(RbdPlace(conf=str(chosen.conf), client=chosen.client, pool=chosen.pool))
