"""How a worker reads a VDI: by NBD over TLS, or by /export_raw_vdi; and the changes between two of them. Blocking code."""

import base64
import binascii
import hashlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import structlog

from synvirt.disks import open_reader
from synvirt.disks.changed import AREAS_MAX, coarser
from synvirt.disks.specs import NbdTlsSpec, XapiExportSpec
from synvirt.durable import put_private_file
from synvirt.errors import CbtReset, DiskReadFailed, Internal, SourceUnreachable
from synvirt.live.xen.machines import vdi_bytes
from synvirt.live.xen.session import XapiFailure, XenSession
from synvirt.live.xen.snapshots import METADATA
from synvirt.machines.texts import clean, is_true, whole_number
from synvirt.machines.xenapi import NULL, Record, listed, text
from synvirt.transport import tls

NBD_PORT_MAX: Final = 65535
# A bit of the platform's bitmap means 64 KiB. The order of the bits in a byte is not documented, so whole bytes are used.
CHANGED_BYTES: Final = 8 * 65536
# Each is a host of the pool that can see the disk.
SERVERS_MAX: Final = 8
# Other errors about changes mean nothing for the tracking.
_NO_TRACKING: Final = frozenset({"VDI_NO_CBT_METADATA", "VDI_INCOMPATIBLE_TYPE", "VDI_MISSING", "SR_OPERATION_NOT_SUPPORTED"})

log = structlog.get_logger(__name__)


# ── NBD ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def by_nbd(session: XenSession, vdi_ref: str, vdi: Record, folder: Path) -> NbdTlsSpec:
    """The first server that serves it. It must show the certificate that the pool reports, issued for the name that the pool
    reports. SourceUnreachable."""
    offered = session.call("say where its disks are served", "VDI.get_nbd_info", vdi_ref)
    troubles: list[str] = []
    for server in list(offered or ())[:SERVERS_MAX]:
        try:
            spec = _server(server, vdi, folder)
            open_reader(spec).close()
        except (SourceUnreachable, DiskReadFailed) as error:
            troubles.append(error.detail)
        else:
            return spec
    if not troubles:
        troubles.append("no network of the pool has the purpose nbd")
    raise SourceUnreachable(
        f"{session.host} serves disk {text(vdi, 'uuid')} by no NBD that we reach: {'; '.join(dict.fromkeys(troubles))}",
        hint="open TCP 10809 of the pool's hosts to this host, and give the network that leads here the purpose nbd",
    )


def _server(server: Record, vdi: Record, folder: Path) -> NbdTlsSpec:
    address, subject, pem = text(server, "address"), text(server, "subject"), text(server, "cert")
    port = whole_number(text(server, "port")) or 0
    if not address or not 0 < port <= NBD_PORT_MAX or not pem:
        raise SourceUnreachable("an NBD server is named without address, port or certificate")
    host = _checked_as(address, subject, pem)
    trusted = folder / f"nbd-{hashlib.sha256(pem.encode()).hexdigest()[:16]}"
    trusted.mkdir(parents=True, exist_ok=True, mode=0o700)
    # Whole or not at all, as other sessions with this pool write it too.
    if not (trusted / "ca-cert.pem").exists():
        put_private_file(trusted / "ca-cert.pem", pem.encode())
    return NbdTlsSpec(
        host=host, port=port, export=text(server, "exportname"), trusted=str(trusted), name=f"VDI {text(vdi, 'uuid')}"
    )


def _checked_as(address: str, subject: str, pem: str) -> str:
    """The name or address that leads to the server and that its certificate is issued for."""
    shown = f"{clean(subject)[:200]!r}"
    if not tls.made_out_to(pem, subject):
        raise SourceUnreachable(f"the NBD certificate of {clean(address)} is not made out to {shown}, as the pool says it is")
    if tls.made_out_to(pem, address):
        return address
    try:
        leads_to = {str(found[4][0]) for found in socket.getaddrinfo(subject, None, type=socket.SOCK_STREAM)}
    except OSError:
        leads_to = set()
    if address not in leads_to:
        raise SourceUnreachable(
            f"the NBD certificate of {clean(address)} is made out to {shown}, a name that does not lead there from this host: "
            "make it known (DNS, /etc/hosts)"
        )
    return subject


# ── exports ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def by_export(session: XenSession, vdi_ref: str, vdi: Record, *, raw: bool, base: str | None = None) -> XapiExportSpec:
    """`base`: the reference of an older snapshot; then only the difference from it comes."""
    host_ref, address = _host_of(session, text(vdi, "SR"))
    at_home = not address or address == session.host
    trust = session.trust(session.host)
    return XapiExportSpec(
        host=session.host if at_home else address,
        port=session.port,
        session_id=session.id,
        vdi=vdi_ref,
        base=base,
        payload="raw" if raw else "vhd",
        verify_tls=trust.verify,
        fingerprint_sha256=trust.fingerprint_sha256 if at_home else session.certificate_of(host_ref),
        size_bytes=vdi_bytes(session.host, vdi),
        name=f"VDI {text(vdi, 'uuid')}",
    )


def _host_of(session: XenSession, sr_ref: str) -> tuple[str, str]:
    """A host that sees the storage, the coordinator first: reference and address."""
    sr: Record = session.call("look for the storage's hosts", "SR.get_record", sr_ref)
    found: list[tuple[str, str]] = []
    for one in listed(sr, "PBDs"):
        pbd: Record = session.call("look for the storage's hosts", "PBD.get_record", one)
        if is_true(text(pbd, "currently_attached")):
            host: Record = session.call("look for the storage's hosts", "host.get_record", text(pbd, "host"))
            found.append((text(pbd, "host"), text(host, "address")))
    if not found:
        raise SourceUnreachable(f"the storage {text(sr, 'name_label')} is attached to no host", hint="plug its PBDs")
    return next((one for one in found if one[1] == session.host), found[0])


# ── changes ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def older(session: XenSession, uuid: str, vdi: Record, key: str) -> tuple[str, Record]:
    """The snapshot's VDI of a change id. CbtReset, when it is gone, or belongs to another disk."""
    try:
        reference = str(session.asked("VDI.get_by_uuid", uuid))
        found: Record = session.asked("VDI.get_record", reference)
    except XapiFailure as failure:
        if failure.code not in ("UUID_INVALID", "HANDLE_INVALID"):
            raise session.as_ours("look for the older snapshot", failure) from failure
        raise _reset(key, f"its older snapshot {uuid} is gone") from failure
    if text(found, "snapshot_of") != text(vdi, "snapshot_of") or text(found, "snapshot_of") in ("", NULL):
        raise _reset(key, f"the snapshots {uuid} and {text(vdi, 'uuid')} are not of one disk")
    return reference, found


def base_of(session: XenSession, uuid: str, vdi: Record, key: str) -> str:
    """The reference of the snapshot that an export is compared with. CbtReset."""
    reference, found = older(session, uuid, vdi, key)
    if text(found, "type") == METADATA:
        raise _reset(key, f"the data of its older snapshot {uuid} is gone")
    if text(found, "virtual_size") != text(vdi, "virtual_size"):
        raise _reset(key, "it was resized since")
    return reference


def changed(session: XenSession, uuid: str, vdi_ref: str, vdi: Record, key: str) -> tuple[tuple[int, int], ...]:
    """(start, length) of the changes since the older snapshot's VDI. CbtReset, where the platform no longer knows them."""
    reference, found = older(session, uuid, vdi, key)
    if not is_true(text(found, "cbt_enabled")) or not is_true(text(vdi, "cbt_enabled")):
        raise _reset(key, "changed block tracking was switched off meanwhile")
    try:
        answer = session.asked("VDI.list_changed_blocks", reference, vdi_ref)
    except XapiFailure as failure:
        # The storage manager's own code for it: SR_BACKEND_FAILURE_460, «Source and target VDI are unrelated».
        if failure.code in _NO_TRACKING or failure.code.startswith("SR_BACKEND_FAILURE"):
            raise _reset(key, failure.text) from failure
        raise session.as_ours("say what changed", failure) from failure
    return areas(answer, vdi_bytes(session.host, vdi))


def areas(answer: Any, size: int) -> tuple[tuple[int, int], ...]:
    """The areas in a bitmap in base64. Internal, where it is none, or does not cover the disk."""
    try:
        bitmap = base64.b64decode(str(answer), validate=False)
    except (binascii.Error, ValueError) as error:
        raise Internal("the list of changed blocks is not base64") from error
    if len(bitmap) * CHANGED_BYTES < size:
        raise Internal(f"the list of changed blocks has {len(bitmap)} bytes; a disk of {size} bytes needs more")
    return coarser([(start, min(end, size) - start) for start, end in _runs(bitmap) if start < size], AREAS_MAX)


def _runs(bitmap: bytes) -> Iterator[tuple[int, int]]:
    start: int | None = None
    for number, byte in enumerate(bitmap):
        if byte and start is None:
            start = number
        elif not byte and start is not None:
            yield start * CHANGED_BYTES, number * CHANGED_BYTES
            start = None
    if start is not None:
        yield start * CHANGED_BYTES, len(bitmap) * CHANGED_BYTES


def _reset(key: str, why: str) -> CbtReset:
    return CbtReset(f"disk {key}: what changed is not known any more: {why}", hint="the whole disk is compared once")
