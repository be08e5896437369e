"""XVA version 1, as XenServer 3 wrote it: ova.xml and folders of gzipped chunks."""

import gzip
from collections.abc import Mapping

CHUNK_BYTES = 3 << 20


def ova_xml(sizes: Mapping[str, int], *, hvm: bool = True, label: str = "Debian Sarge") -> bytes:
    """`sizes`: of the disks by their device names."""
    vbds = "".join(
        f'<vbd device="{device}" function="{"root" if number == 0 else "unknown"}" mode="w" vdi="vdi_{device}"/>'
        for number, device in enumerate(sizes)
    )
    vdis = "".join(
        f'<vdi name="vdi_{device}" size="{size}" source="file://{device}" type="dir-gzipped-chunks" variety="system"/>'
        for device, size in sizes.items()
    )
    return (
        f'<?xml version="1.0"?>\n<appliance version="0.1"><vm name="vm"><label>{label}</label>'
        '<shortdesc>Debian 3.1</shortdesc><config mem_set="268435456" vcpus="2"/>'
        f'<hacks is_hvm="{str(hvm).lower()}" kernel_boot_cmdline="root=/dev/sda1 ro"/>{vbds}</vm>{vdis}</appliance>'
    ).encode()


def files(disks: Mapping[str, bytes], **described: bool | str) -> dict[str, bytes]:
    """The files of an export, by their names within its folder."""
    found = {"ova.xml": ova_xml({device: len(disk) for device, disk in disks.items()}, **described)}  # type: ignore[arg-type]
    for device, disk in disks.items():
        for number, start in enumerate(range(0, len(disk), CHUNK_BYTES)):
            found[f"{device}/chunk-{number:09d}.gz"] = gzip.compress(disk[start : start + CHUNK_BYTES], 1)
    return found
