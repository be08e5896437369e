"""What is measured, a row each. To add one: a line here, and its images in sources.py."""

from dataclasses import dataclass

QEMU_IMG = "qemu-img convert -W -m 16 -O raw"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """`synvirt disk convert {source} {target}` against `peer`, a command line that makes `{target}` of `{peer_source}`.

    `reach` is the ratio to reach, the peer's seconds by ours. `seconds_max` and `memory_mib_max` bound ours by themselves.
    `reflink`: source and target lie on one file system that can share their blocks.
    """

    name: str
    source: str
    peer: str
    reach: float
    peer_source: str = ""
    seconds_max: float | None = None
    memory_mib_max: int = 256
    reflink: bool = False


ROWS = (
    Row(
        name="ova",
        source="plain.ova",
        peer=f"{QEMU_IMG} -f vmdk {{peer_source}} {{target}}",
        peer_source="stream.vmdk",
        reach=4,
    ),
    Row(
        name="ova, sha256 checked",
        source="manifest.ova",
        peer=f"{QEMU_IMG} -f vmdk {{peer_source}} {{target}}",
        peer_source="stream.vmdk",
        reach=3,
    ),
    Row(
        name="ova, nbdcopy",
        source="plain.ova",
        peer="nbdcopy -- [ qemu-nbd -r -f vmdk {peer_source} ] {target}",
        peer_source="stream.vmdk",
        reach=3,
    ),
    Row(name="raw", source="disk.raw", peer=f"{QEMU_IMG} -f raw {{peer_source}} {{target}}", reach=1.1),
    Row(name="raw, cp", source="disk.raw", peer="cp --sparse=always {peer_source} {target}", reach=1.1),
    Row(name="raw, nbdcopy", source="disk.raw", peer="nbdcopy -- [ qemu-nbd -r -f raw {peer_source} ] {target}", reach=3),
    Row(name="qcow2", source="disk.qcow2", peer=f"{QEMU_IMG} -f qcow2 {{peer_source}} {{target}}", reach=1.1),
    Row(name="qcow2, nbdcopy", source="disk.qcow2", peer="nbdcopy -- [ qemu-nbd -r -f qcow2 {peer_source} ] {target}", reach=3),
    Row(name="qcow2 zlib", source="zlib.qcow2", peer=f"{QEMU_IMG} -f qcow2 {{peer_source}} {{target}}", reach=2.5),
    Row(name="qcow2 zstd", source="zstd.qcow2", peer=f"{QEMU_IMG} -f qcow2 {{peer_source}} {{target}}", reach=1.5),
    Row(name="vhdx", source="disk.vhdx", peer=f"{QEMU_IMG} -f vhdx {{peer_source}} {{target}}", reach=1.1),
    Row(name="vhd", source="disk.vhd", peer=f"{QEMU_IMG} -f vpc {{peer_source}} {{target}}", reach=1.1),
    Row(name="vdi", source="disk.vdi", peer=f"{QEMU_IMG} -f vdi {{peer_source}} {{target}}", reach=1.1),
    Row(name="sparse vmdk", source="sparse.vmdk", peer=f"{QEMU_IMG} -f vmdk {{peer_source}} {{target}}", reach=1.1),
    *(
        Row(
            name=f"{name} on xfs",
            source=source,
            peer=f"{QEMU_IMG} -f {peer_format} {{peer_source}} {{target}}",
            reach=10,
            reflink=True,
        )
        for name, source, peer_format in (
            ("raw", "disk.raw", "raw"),
            ("qcow2", "disk.qcow2", "qcow2"),
            ("vhdx", "disk.vhdx", "vhdx"),
            ("vdi", "disk.vdi", "vdi"),
            ("sparse vmdk", "sparse.vmdk", "vmdk"),
        )
    ),
    Row(
        name="1 TiB raw, nearly empty",
        source="huge.raw",
        peer=f"{QEMU_IMG} -f raw {{peer_source}} {{target}}",
        reach=1,
        seconds_max=1,
    ),
    Row(
        name="1 TiB qcow2, nearly empty",
        source="huge.qcow2",
        peer=f"{QEMU_IMG} -f qcow2 {{peer_source}} {{target}}",
        reach=1,
        seconds_max=1,
    ),
)
