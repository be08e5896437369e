"""Freezes disks of a running VM by Proxmox VE's own call for backup tools, `backup-access-setup`. Blocking code.

    guest ─▶ disk, with Proxmox VE's copy-before-write ─▶ drive-scsi0-fleecing: our overlay
    a node of its own ◀── both: the disks as they were, all of one moment

pve-qemu, debian/patches/pve, «PVE backup: implement backup-access-setup and teardown» (QAPI text and pve-backup.c); how vzdump
uses it: qemu-server, PVE/VZDump/QemuServer.pm, archive_external. It decides the names of the overlays, and allows one backup or
access per VM at a time. Changes still come from our own bitmaps (bitmaps.py), as the call's own have steps of 4 MiB, and there
is one per target.

Never tried on a node: our tests simulate the call on QMP by that text, with the real QEMU's filters behind it.
"""

import re
from collections.abc import Mapping
from typing import Final

import structlog

from synvirt.errors import SnapshotFailed
from synvirt.kvm.qmp import Qmp, QmpError, rows

log = structlog.get_logger(__name__)

_OVERLAY: Final = re.compile(r".*/(synvirt-[A-Za-z0-9-]+)\.([a-z]+[0-9]+)\.overlay")


def offered(qmp: Qmp) -> bool:
    """Whether this QEMU has the call. Only Proxmox VE's own has it, from 9.2 on (Proxmox VE 8.4)."""
    try:
        answer = qmp.ask("query-proxmox-support")
    except QmpError:
        return False
    return isinstance(answer, dict) and answer.get("backup-access-api") is True


def device(key: str) -> str:
    return f"drive-{key}"


def fleecing(key: str) -> str:
    return f"{device(key)}-fleecing"


def begin(qmp: Qmp, name: str, overlays: Mapping[str, str]) -> dict[str, str]:
    """The node of each frozen disk, by key; none where QEMU refuses, and then nothing is left. SnapshotFailed."""
    try:
        for key, overlay in overlays.items():
            file = {"driver": "file", "filename": overlay}
            node = {"driver": "qcow2", "node-name": fleecing(key), "discard": "unmap", "file": file}
            qmp.ask("blockdev-add", node)
        wanted = [{"device": device(key), "bitmap-mode": "none"} for key in overlays]
        answer = rows(qmp.ask("backup-access-setup", {"target-id": name, "devices": wanted}))
    except QmpError as error:
        # A backup is running there, or this version wants its overlays in another form.
        log.info("backup-access-setup is refused, and QEMU's own filters are taken", vm=qmp.what, cause=error.detail)
        end(qmp, name)
        return {}
    nodes = {str(one.get("device", "")).removeprefix("drive-"): str(one.get("node-name", "")) for one in answer}
    if not all(nodes.get(key) for key in overlays):
        end(qmp, name)
        raise SnapshotFailed(f"{qmp.what}: backup-access-setup gives no node for {', '.join(set(overlays) - set(nodes))}")
    return {key: nodes[key] for key in overlays}


def held(qmp: Qmp) -> dict[str, str]:
    """Our overlays that QEMU has open for the call: the snapshot of each node. Overlays of others have other files."""
    found = {}
    for one in rows(qmp.ask("query-named-block-nodes", {"flat": True})):
        overlay = _OVERLAY.fullmatch(str(one.get("file", "")))
        node = str(one.get("node-name", ""))
        if overlay is not None and node == fleecing(overlay.group(2)):
            found[node] = overlay.group(1)
    return found


def end(qmp: Qmp, name: str) -> None:
    """Exports first. Idempotent; it ends nothing of others."""
    ours = [node for node, snapshot in held(qmp).items() if snapshot == name]
    if not ours:
        return
    try:
        # With success it would clear the target's bitmap; ours has none.
        qmp.ask("backup-access-teardown", {"target-id": name, "success": False})
    except QmpError as error:
        log.info("backup-access-teardown is refused", vm=qmp.what, cause=error.detail)
    for node in ours:
        qmp.ask("blockdev-del", {"node-name": node})
