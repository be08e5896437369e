"""Finds the ledgers in the tar of a receipt of this host. The statement is checked first."""

import tarfile
from pathlib import Path
from typing import Any
from uuid import UUID

from synvirt.disks.checking.receipt_rows import LedgerSpec
from synvirt.errors import MalformedArchive
from synvirt.proof.bag import SIGNATURE, STATEMENT
from synvirt.proof.signing import PublicKey
from synvirt.proof.verifying import size_of, statement_of, volumes


def ledgers_of(tar: Path, job_id: UUID, key: PublicKey) -> dict[str, LedgerSpec]:
    """The ledgers by disk key, for the disks that have one. MalformedArchive, if the signature of the statement is not by that
    key, or the tar lacks what the statement names."""
    root = f"receipt-{job_id}"
    try:
        with tarfile.open(tar, mode="r:") as opened:
            members = {member.name: member for member in opened if member.isreg()}
            content, signature = (_content(opened, members[f"{root}/{name}"]) for name in (STATEMENT, SIGNATURE))
        key.check_sshsig(content, signature.decode(), SIGNATURE)
        statement = statement_of(content)
        signed: dict[str, str] = {one["name"]: one["digest"]["sha256"] for one in statement["subject"]}
        found = {}
        for disk in volumes(statement):
            if (name := disk.get("ledger")) is not None:
                member, disk_key = members[f"{root}/{name}"], str(disk["key"])
                found[disk_key] = LedgerSpec(
                    path=str(tar),
                    offset=member.offset_data,
                    length=member.size,
                    sha256=signed[name],
                    disk=disk_key,
                    size_bytes=size_of(disk),
                )
    except (tarfile.TarError, OSError, ValueError, LookupError, TypeError) as error:
        raise MalformedArchive(f"the receipt of job {job_id} cannot be read") from error
    return found


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file: Any = tar.extractfile(member)
    return bytes(file.read())
