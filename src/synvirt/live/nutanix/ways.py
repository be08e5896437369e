"""The way to read a VM's disks, and why no better one. It is one for all of them, as a snapshot freezes them at one moment.

nfs     the snapshot's files on the container's NFS export, and changed regions (Prism Element)        warm, cold
iscsi   a volume group of the recovery point's disks, and changed regions (Prism Central, iSCSI)       warm, cold
image   an image of each disk, downloaded whole while the VM is off (either Prism)                     cold
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from synvirt.live.nutanix.form import Transport

WayName = Literal["nfs", "iscsi", "image"]
ORDER: Final[tuple[WayName, ...]] = ("nfs", "iscsi", "image")
DESCRIPTIONS: Final[Mapping[WayName, str]] = {
    "nfs": "NFS, from the snapshot's file on its container",
    "iscsi": "iSCSI, from a volume group of its recovery point",
    "image": "an image that is made of it and downloaded whole",
}


@dataclass(frozen=True, slots=True)
class Way:
    """`why`: what closes better ways, or this one where it is not `open`."""

    name: WayName
    why: str = ""
    open: bool = True

    @property
    def no_deltas(self) -> str | None:
        """Why this way cannot copy warm; None: it can."""
        if not self.open:
            return f"its disks cannot be read: {self.why}"
        if self.name != "image":
            return None
        return f"an image download cannot report changes{f', and {self.why}' if self.why else ''}"

    @property
    def description(self) -> str:
        """The way in words, for the manifest."""
        if not self.open:
            return f"no way: {self.why}"
        return f"{DESCRIPTIONS[self.name]}{f' ({self.why})' if self.why else ''}"


def chosen(transport: Transport, closed: Mapping[WayName, str | None]) -> Way:
    """The first way that is not closed; `closed` has the reason for each other. The operator's choice has no alternative."""
    if transport != "auto":
        why = closed[transport]
        return Way(transport, why or "", open=why is None)
    whys = [why for name in ORDER if (why := closed[name]) is not None]
    for number, name in enumerate(ORDER):
        if closed[name] is None:
            return Way(name, "; ".join(whys[:number]))
    return Way("nfs", "; ".join(whys), open=False)
