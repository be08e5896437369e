"""VMDK descriptors that stand for a device of their own host: raw device mappings of ESX, physical disks of Workstation and
VirtualBox. (VMware «Virtual Disk Format 1.1», createType.) There is nothing behind them to copy."""

import re
from contextlib import closing

from synvirt.blocks import bytes_of
from synvirt.disks import open_reader
from synvirt.disks.specs import ImageSpec, ReaderSpec

# A descriptor is a text of some hundred bytes; its first lines have the type.
_LOOKED_AT_BYTES = 4096
_KIND = re.compile(
    rb'^\s*createType\s*=\s*"(vmfsRawDeviceMap|vmfsPassthroughRawDeviceMap|vmfsRDM|vmfsRDMP|fullDevice|partitionedDevice)"',
    re.MULTILINE | re.IGNORECASE,
)


def raw_device(spec: ReaderSpec) -> str | None:
    """The createType of a VMDK that stands for a device; None for every other disk. Raises what reading its file raises."""
    if not isinstance(spec, ImageSpec) or spec.format != "vmdk":
        return None
    with closing(open_reader(spec.over)) as file:
        head = bytes_of(file, 0, min(_LOOKED_AT_BYTES, file.size))
    found = _KIND.search(head) if head.startswith(b"#") else None
    return None if found is None else found[1].decode()
