"""What is measured, a row each. To add one: a line here, and its images in sources.py."""

from dataclasses import dataclass

QEMU_IMG = "qemu-img convert -W -m 16 -O raw"
# Where the target is on a file system that is not in memory, ours has flushed it when it ends; by this qemu-img does likewise.
DURABLE = "-t writeback"

# A verified conversion, as people do it with QEMU's tools: nothing in them compares while it copies.
QEMU_VERIFIED = (
    'sh -c \'qemu-img convert -W -m 16 -f {format} -O raw "$0" "$1" &&'
    ' qemu-img compare -f {format} -F raw "$0" "$1"\' {{peer_source}} {{target}}'
)
# Our own command without the option whose cost is wanted; `synvirt` stands for the one that is measured.
OURSELVES = "synvirt disk convert {peer_source} {target}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """`synvirt disk convert {source} {target}` against `peer`, a command line that makes `{target}` of `{peer_source}`.

    `reach` is the ratio to reach, the peer's seconds by ours; 0: the row only tells a cost. `options` are ours.
    `seconds_max` and `memory_mib_max` bound ours by themselves. `reflink`: source and target lie on one file system that can
    share their blocks.
    """

    name: str
    source: str
    peer: str
    reach: float
    peer_source: str = ""
    options: tuple[str, ...] = ()
    seconds_max: float | None = None
    memory_mib_max: int = 256
    reflink: bool = False


# Name, our source, QEMU's name of the format, what to reach against qemu-img. An OVA is unpacked for the peers. nbdcopy moves
# each byte through a socket: against it, to be ahead is what is asked.
SOURCES: tuple[tuple[str, str, str, float], ...] = (
    ("raw", "disk.raw", "raw", 1.15),
    ("qcow2", "disk.qcow2", "qcow2", 1.15),
    ("qcow2 zlib", "zlib.qcow2", "qcow2", 2.8),
    ("qcow2 zstd", "zstd.qcow2", "qcow2", 1.8),
    ("vhdx", "disk.vhdx", "vhdx", 1.15),
    ("vhd", "disk.vhd", "vpc", 1.15),
    ("vdi", "disk.vdi", "vdi", 1.15),
    ("sparse vmdk", "sparse.vmdk", "vmdk", 1.15),
)


def _convert(peer_format: str, options: str = "") -> str:
    return f"{QEMU_IMG} {options} -f {peer_format} {{peer_source}} {{target}}"


def _nbdcopy(peer_format: str) -> str:
    return f"nbdcopy -- [ qemu-nbd -r -f {peer_format} {{peer_source}} ] {{target}}"


_UNPACKED = "stream.vmdk"
_CP = "cp --sparse=always {peer_source} {target}"

ROWS = (
    Row(name="ova", source="plain.ova", peer=_convert("vmdk"), peer_source=_UNPACKED, reach=4.5),
    Row(name="ova, sha256 checked", source="manifest.ova", peer=_convert("vmdk"), peer_source=_UNPACKED, reach=3),
    Row(name="ova, nbdcopy", source="plain.ova", peer=_nbdcopy("vmdk"), peer_source=_UNPACKED, reach=1),
    *(Row(name=name, source=source, peer=_convert(kind), reach=reach) for name, source, kind, reach in SOURCES),
    Row(name="raw, cp", source="disk.raw", peer=_CP, reach=1.15),
    *(Row(name=f"{name}, nbdcopy", source=source, peer=_nbdcopy(kind), reach=1) for name, source, kind, _ in SOURCES),
    *(
        # Blocks of QEMU's VHD and VDI do not begin where a file system's do, so that most of them cannot be shared.
        Row(
            name=f"{name} on xfs",
            source=source,
            peer=_convert(kind, DURABLE),
            reach=1 if name in ("vhd", "vdi") else 10,
            reflink=True,
        )
        for name, source, kind, _ in SOURCES
        if name not in ("qcow2 zlib", "qcow2 zstd")  # of which nothing can be shared
    ),
    Row(name="raw on xfs, cp", source="disk.raw", peer=_CP, reach=0, reflink=True),
    # Not VHDX: QEMU has no map of one, and reads 1 TiB of zeros for minutes.
    *(
        Row(name=f"1 TiB {name}, nearly empty", source=source, peer=_convert(kind), reach=1, seconds_max=1)
        for name, source, kind in (("raw", "huge.raw", "raw"), ("qcow2", "huge.qcow2", "qcow2"))
    ),
    *(
        Row(
            name=f"{name} --verify",
            source=source,
            peer=QEMU_VERIFIED.format(format=kind),
            options=("--verify",),
            reach=1,
        )
        for name, source, kind, _ in SOURCES
        if name in ("raw", "qcow2 zlib")
    ),
    Row(name="raw --verify, its cost", source="disk.raw", peer=OURSELVES, options=("--verify",), reach=0),
    Row(name="qcow2 zlib --verify, its cost", source="zlib.qcow2", peer=OURSELVES, options=("--verify",), reach=0),
)
