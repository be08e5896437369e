"""Where volumes go, by the settings."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from synvirt.destinations import Destination
    from synvirt.destinations.directory import DirectoryDestination
    from synvirt.settings import Settings


def make_destinations(settings: "Settings") -> "dict[str, Destination]":
    """The destinations by their names, the default first. BadRequest, as `chosen.destinations`."""
    from synvirt.destinations import chosen
    from synvirt.destinations.directory import DirectoryDestination

    made = chosen.destinations(settings, shut_out=_is_shut_out(settings.hypervisor_uri))
    for name, setting in settings.destinations_by_name.items():
        if isinstance(destination := made[name], DirectoryDestination) and setting.kind == "directory":
            _make_folder(destination, setting.path)
    return made


def _is_shut_out(uri: str) -> bool:
    """Whether guests' files are another user's while they run, and this process may not open such files."""
    from synvirt.cage import may_open_others_files
    from synvirt.kvm import qemu_user

    as_we_do = "/session" in uri or (qemu_user.embedded_root(uri) is not None and os.geteuid() != 0)
    return not as_we_do and not may_open_others_files()


def _make_folder(destination: "DirectoryDestination", folder: Path) -> None:
    """Makes the folder of the volumes, if its file system is there and answers; else the first volume's making does."""
    import structlog

    from synvirt.kvm import limit, qemu_user

    def make() -> None:
        if destination.why_away() is None:
            qemu_user.make(folder)

    try:
        limit.within(limit.FOLDER_ANSWERS_S, make)
    except TimeoutError:
        log = structlog.get_logger(__name__)
        log.warning("the file system of a destination does not answer", folder=str(folder), waited_s=limit.FOLDER_ANSWERS_S)
