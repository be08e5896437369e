"""An OVF's text as the description of its machine."""

from synvirt.offline.ovf import disks
from synvirt.offline.ovf.description import Description, described


def parse(data: bytes, name: str, vm: str | None = None) -> Description:
    return described(disks.parse(data, name, vm), data)
