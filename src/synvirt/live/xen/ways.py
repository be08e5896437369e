"""The ways to read a disk and its deltas; chosen for each disk, with the reason. No I/O."""

from typing import Final, Literal, NamedTuple

from synvirt.machines.texts import clean, whole_number
from synvirt.machines.xenapi import Record, listed, table, text
from synvirt.sizes import GIB

Transport = Literal["auto", "nbd", "export"]
Bytes = Literal["nbd", "vhd", "raw"]
Deltas = Literal["cbt", "vhd"]

# The texts for the operator.
READ_BY: Final[dict[Bytes, str]] = {
    "nbd": "NBD over TLS",
    "vhd": "/export_raw_vdi over HTTPS, as VHD (what is allocated)",
    "raw": "/export_raw_vdi over HTTPS, raw (the whole disk)",
}
DELTAS_BY: Final[dict[Deltas, str]] = {
    "cbt": "changed block tracking",
    "vhd": "the difference of two snapshots, as VHD in steps of 2 MiB",
}
# The VHD format's largest disk in blocks of 2 MiB.
VHD_BYTES_MAX: Final = 2040 * GIB
# SR types with VHD disks (storage manager drivers of XenServer and XCP-ng). Others (gfs2, zfs-vol, udev, iso) have none.
_VHD_STORES: Final = frozenset(
    {
        "ext", "file", "nfs", "smb", "cifs", "lvm", "lvmoiscsi", "lvmohba", "lvmofcoe", "xfs", "zfs", "cephfs", "glusterfs",
        "moosefs", "linstor", "largeblock",
    }
)  # fmt: skip
# On these a snapshot takes as much space again as the disk, since the newest layer of a disk always has full size.
THICK_STORES: Final = frozenset({"lvm", "lvmoiscsi", "lvmohba", "lvmofcoe"})


# A mark in a disk: it cannot be tracked, for this reason.
REFUSED: Final = "synvirt-untracked"


class Way(NamedTuple):
    """`deltas` None: there are none, so the disk moves cold; `why`: what forbids a better way. `instead`: what forbids deltas
    by VHD, if tracking turns out to fail."""

    bytes: Bytes
    deltas: Deltas | None
    why: str = ""
    instead: str = ""

    @property
    def description(self) -> str:
        """The way in words, for the manifest."""
        deltas = f"; deltas by {DELTAS_BY[self.deltas]}" if self.deltas else "; no deltas"
        return READ_BY[self.bytes] + deltas + (f" ({self.why})" if self.why else "")


class Seen(NamedTuple):
    """The reasons against each way; empty, where there is none."""

    no_nbd: str
    no_cbt: str
    no_vhd: str


def seen(vdi: Record, sr: Record, *, offers_nbd: bool, no_nbd: str, restrictions: Record) -> Seen:
    """`no_nbd`: why the pool offers no NBD. `restrictions`: what the pool's licence forbids."""
    no_cbt = ""
    if text(restrictions, "restrict_cbt") == "true":
        no_cbt = "the pool's licence has no changed block tracking"
    elif "vdi_enable_cbt" not in listed(sr, "allowed_operations"):
        no_cbt = f"storage of type {text(sr, 'type') or 'unknown'} tracks no changed blocks"
    elif refusal := text(table(vdi, "other_config"), REFUSED):
        no_cbt = f"the pool refused to track it: {clean(refusal)}"
    return Seen("" if offers_nbd else no_nbd, no_cbt, _no_vhd(vdi, sr))


def _no_vhd(vdi: Record, sr: Record) -> str:
    config, kind = table(vdi, "sm_config"), text(sr, "type")
    image = text(config, "image-format") or text(config, "vdi_type") or "vhd"
    if kind not in _VHD_STORES:
        return f"storage of type {kind or 'unknown'} keeps no VHDs"
    if image.lower() != "vhd" or text(config, "type") == "raw":
        return f"it is kept as {image if image.lower() != 'vhd' else 'raw'}, and not as VHD"
    if (whole_number(text(vdi, "virtual_size")) or 0) > VHD_BYTES_MAX:
        return f"it has over {VHD_BYTES_MAX // GIB} GiB, more than a VHD holds"
    return ""


def way(wished: Transport, found: Seen) -> Way:
    """The first possible way: NBD before exports, tracking before comparing layers."""
    by_nbd = wished == "nbd" or (wished == "auto" and not found.no_nbd)
    whole: Bytes = "nbd" if by_nbd else ("raw" if found.no_vhd else "vhd")
    reasons = [] if by_nbd or wished == "export" else [found.no_nbd]
    if by_nbd and not found.no_cbt:
        return Way(whole, "cbt", instead="options.transport nbd forbids exports" if wished == "nbd" else found.no_vhd)
    if by_nbd:
        reasons.append(found.no_cbt)
    if wished != "nbd" and not found.no_vhd:
        return Way(whole, "vhd", "; ".join(reasons))
    return Way(whole, None, "; ".join([*reasons, found.no_vhd] if wished != "nbd" else reasons))
