"""The way to read a VM's disks. It is chosen when a job is planned, and shown in its manifest. Blocking.

    in place   the VM's own files, over SMB
    exported   Hyper-V writes them to a share first (exporting.py)

The choice depends on the source's options and on the files' place. It is the same for all passes of a job, unless the VM's
files are moved meanwhile. Then the way changes, and no pass is lost: both ways use the same reference points.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from synvirt.errors import SynvirtError
from synvirt.live.hyperv import machines
from synvirt.live.hyperv.exporting import Exports
from synvirt.live.hyperv.hosts import Host
from synvirt.model.machine import Concern
from synvirt.remote import Remote, smb_shares

Drives = Sequence[Mapping[str, Any]]


def exports_of(host: Host, drives: Drives) -> Exports | None:
    """Where the disks are exported to; None: they are read in place."""
    return host.exports if host.exports is not None and host.exports.why(drives) is not None else None


def read_by(host: Host, drives: Drives) -> Concern:
    """The way as a concern; a warning, if it cannot be used: so a refusing share is known before the job begins."""
    files = [drive for drive in drives if drive["path"] and not drive["physical"]]
    exports = exports_of(host, drives)
    if exports is not None:
        remote, _ = exports.remote(exports.to)
        finding, stands = _protection(host, remote)
        assessment = (
            f"Hyper-V exports them to {exports.to}, {exports.why(drives)}: all of a snapshot the first time, then what "
            f"changed. From there they are read over SMB ({finding})."
        )
        remedy = "Have room there for the disks' data. options.read_by of the source says which way is taken."
    else:
        ways, stands = list[str](), True
        for drive in files:
            way, reached = _in_place(host, str(drive["path"]))
            ways.append(f"{machines.key_of(drive)}: {way}")
            stands &= reached
        assessment = f"In place, over SMB. {'; '.join(ways) or 'There is no disk in a file.'}"
        remedy = (
            "options.shares of the source names other shares than the administrative ones; with options.export_to Hyper-V "
            "writes the disks of such VMs to a share."
        )
    return Concern(
        id="hyperv.read_by",
        category="Information" if stands else "Warning",
        label="How the disks are read" if stands else "The disks cannot be read as things are",
        assessment=assessment,
        remedy=remedy,
    )


def _in_place(host: Host, path: str) -> tuple[str, bool]:
    try:
        place = host.shares.place(path)
    except SynvirtError as error:
        return error.detail, False
    finding, stands = _protection(host, host.shares.remote(place))
    return f"\\\\{place.host or host.shares.host}\\{place.share} ({finding})", stands


def _protection(host: Host, remote: Remote) -> tuple[str, bool]:
    """Asked once per session for each share."""
    if remote.url not in host.protections:
        try:
            host.protections[remote.url] = smb_shares.protection(remote), True
        except SynvirtError as error:
            host.protections[remote.url] = error.detail, False
    return host.protections[remote.url]
