"""The devices of zfs volumes. udev makes a link with each volume's name; it may be late, or be left from a volume that is
gone."""

import contextlib
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

from synvirt.disks.raw.zvols import LINKS, zvol_name
from synvirt.errors import DiskWriteFailed

DEVICES = Path(LINKS)
# udev makes the link within milliseconds; on a host that imports a large pool at this moment it takes seconds.
LINK_TIMEOUT_S = 60.0
ASK_UDEV_EVERY_S = 2.0


class Links:
    """`name_of` asks an open device for the name of its volume."""

    def __init__(
        self, devices: Path = DEVICES, *, name_of: Callable[[int], str] = zvol_name, timeout_s: float = LINK_TIMEOUT_S
    ) -> None:
        self._devices, self._name_of, self._timeout_s = devices, name_of, timeout_s

    def device(self, volume: str) -> str:
        """The link, once it leads to this volume. DiskWriteFailed, where it does not appear."""
        path = self._devices / volume
        self._wait_for_link(path, volume)
        return str(path)

    def _wait_for_link(self, path: Path, name: str) -> None:
        deadline = time.monotonic() + self._timeout_s
        ask_udev_at = time.monotonic() + ASK_UDEV_EVERY_S
        while wrong := self._found_at(path, name):
            if time.monotonic() >= deadline:
                raise DiskWriteFailed(
                    f"after {self._timeout_s:g} s the device {path} of the zfs volume {name} cannot be used: {wrong}",
                    hint="udev makes the link by the rules of zfsutils-linux: does it run? Run `udevadm trigger`",
                )
            if time.monotonic() >= ask_udev_at:
                self._ask_udev(name)
                ask_udev_at = time.monotonic() + ASK_UDEV_EVERY_S
            time.sleep(0.02)

    def _ask_udev(self, name: str) -> None:
        """Makes udev look at the volume's device again: root can ask for it; others can close it after writing, which udev
        notices."""
        for device in Path("/sys/class/block").glob("zd*"):
            node = f"/dev/{device.name}"
            with contextlib.suppress(OSError):
                if self._name_at(node, os.O_RDONLY) == name:
                    self._name_at(node, os.O_WRONLY)
                    (device / "uevent").write_text("change")

    def _name_at(self, node: str, mode: int) -> str:
        descriptor = os.open(node, mode | os.O_CLOEXEC)
        try:
            return self._name_of(descriptor)
        finally:
            os.close(descriptor)

    def _found_at(self, path: Path, name: str) -> str:
        """What is wrong with the device at `path`; empty, if it is right."""
        try:
            if not stat.S_ISBLK(path.stat().st_mode):
                return "it is not a block device"
            found = self._name_at(str(path), os.O_RDONLY)
        except PermissionError as error:
            raise DiskWriteFailed(
                f"the device {path} cannot be opened: {error.strerror}",
                hint="the service's user must be a member of the group that owns it, which is `disk` on Debian",
            ) from error
        except OSError as error:
            return error.strerror or "it cannot be opened"
        return "" if found == name else f"it is the device of {found}"
