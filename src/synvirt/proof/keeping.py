"""The receipts of this host: a tar for each in {data_dir}/receipts, numbered from 1; each names the statement of the one
before.

    receipts/00000001-JOB.tar  00000002-JOB.tar …      receipts/hashes/JOB/0.hashes …   (of jobs that are not done)

A receipt exists whole or not at all, and a job has one. Receipts stay when their jobs are removed: without one of them the
chain is broken. Blocking code, from any thread of the one service that has the folder.
"""

import contextlib
import json
import os
import re
import shutil
import tarfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

from synvirt.disks.checking.block_hashes import known_digests
from synvirt.disks.checking.ledger import BLOCK_BYTES
from synvirt.disks.checking.receipt_rows import LedgerSpec
from synvirt.durable import sync_folder
from synvirt.errors import MalformedArchive, NotFound
from synvirt.model.job import Receipt
from synvirt.model.values import Model, now
from synvirt.proof.bag import STAMP, STATEMENT, Ledger, sha256_of, write_bag, write_ledger
from synvirt.proof.ledgers import ledgers_of
from synvirt.proof.signing import HostKey
from synvirt.proof.stamping import TimeStamps

MOMENT = "after the last copy, before conversion and the first boot"
UNREAD = "not all of it was read by the copy: it shares the blocks of the file it came from, or something else wrote it"
_NAME = re.compile(r"([0-9]{8,})-([0-9a-f-]{36})\.tar")
_UNFINISHED = re.compile(r"\.[0-9a-f-]{36}")


class ReceiptKey(Model):
    """Answer of GET /receipts/key. `head`: the newest receipt's number and its statement's SHA-256, by which one that is
    missing at the chain's end is seen."""

    host: str
    public_key: str
    fingerprint: str
    allowed_signers: str
    head: Receipt | None


@dataclass(frozen=True, slots=True)
class CopiedDisk:
    """`hashes`: the file with the hashes made during the copy."""

    key: str
    label: str
    volume: str
    size_bytes: int
    hashes: Path


@dataclass(frozen=True, slots=True)
class MovedJob:
    """`facts`: the statement's content about it. `token`: of the host that has hashed its disks; None, if none has finished.
    `rehearsal`: the result of its last one, see `rehearsal_result`; None: it had none."""

    id: UUID
    facts: Mapping[str, Any]
    plan: bytes
    disks: tuple[CopiedDisk, ...]
    token: UUID | None
    rehearsal: bytes | None = None


@dataclass(frozen=True, slots=True)
class ReceiptContent:
    """`statement`: its predicate. `is_stamped`: an authority has time-stamped it (RFC 3161)."""

    statement: dict[str, Any]
    is_stamped: bool


class Receipts:
    """`stamps`: the authority that stamps receipts; None: none does."""

    def __init__(self, folder: Path, key: HostKey, stamps: TimeStamps | None = None) -> None:
        self._folder, self.key, self._stamps = folder, key, stamps
        self._lock = threading.Lock()
        folder.mkdir(mode=0o750, exist_ok=True)
        self._sweep()

    def _sweep(self) -> None:
        """Removes what a killed service left of a receipt: its job may have been cancelled, and is never here again."""
        for entry in os.scandir(self._folder):
            if _UNFINISHED.fullmatch(entry.name):
                shutil.rmtree(entry.path, ignore_errors=True)

    # ── hashes of jobs under way ──

    def hashes_folder(self, job_id: UUID) -> Path:
        return self._folder / "hashes" / str(job_id)

    def hashes_file(self, job_id: UUID, number: int) -> Path:
        """The file for the hashes of the disk with this number; its folder exists."""
        folder = self.hashes_folder(job_id)
        folder.mkdir(mode=0o750, parents=True, exist_ok=True)
        return folder / f"{number}.hashes"

    def hand_on(self, before: UUID, job_id: UUID) -> None:
        """Gives the hashes to the job that continues with the volumes. Idempotent."""
        if self.hashes_folder(before).exists() and not self.hashes_folder(job_id).exists():
            self.hashes_folder(before).rename(self.hashes_folder(job_id))

    def forget_hashes(self, job_id: UUID) -> None:
        """Removes the hashes of a job that will have no receipt."""
        shutil.rmtree(self.hashes_folder(job_id), ignore_errors=True)

    def forget_hashes_but(self, is_kept: Callable[[UUID], bool]) -> None:
        """Removes the hashes of jobs for which `is_kept` is false: another host continued them while this one was away."""
        with contextlib.suppress(FileNotFoundError):
            for folder in list((self._folder / "hashes").iterdir()):
                with contextlib.suppress(ValueError):  # a folder that somebody else made
                    job_id = UUID(folder.name)
                    if not is_kept(job_id):
                        shutil.rmtree(folder, ignore_errors=True)

    # ── receipts ──

    def make(self, job: MovedJob) -> Receipt:
        """Makes a job's receipt once; called again, it returns the same. OSError; MalformedArchive: the one before it is
        damaged."""
        with self._lock:
            if (found := self._of(job.id)) is not None:
                return self._receipt(found)
            work = self._folder / f".{job.id}"
            shutil.rmtree(work, ignore_errors=True)  # left by a crash
            work.mkdir(mode=0o700)
            try:
                return self._make(work, job)
            finally:
                shutil.rmtree(work, ignore_errors=True)

    def _make(self, work: Path, job: MovedJob) -> Receipt:
        ledgers: list[Ledger] = []
        volumes: list[dict[str, Any]] = []
        for number, disk in enumerate(job.disks):
            fields: dict[str, Any] = {
                "key": disk.key,
                "label": disk.label,
                "volume": disk.volume,
                "size_bytes": disk.size_bytes,
            }
            digests = None if job.token is None else known_digests(disk.hashes, disk.size_bytes, job.token)
            if digests is None:
                volumes.append({**fields, "ledger": None, "reason": UNREAD})
                continue
            ledger = write_ledger(f"data/disk{number}.sha256", digests, work / str(number))
            ledgers.append(ledger)
            volumes.append({**fields, "ledger": ledger.name, "block_bytes": BLOCK_BYTES, "moment": MOMENT})
        head = self._head()
        previous = None if head is None else self._receipt(head)
        sequence = 1 if previous is None else previous.sequence + 1
        link = None if previous is None else {"sequence": previous.sequence, "sha256": previous.sha256}
        predicate = {
            "host": self.key.host,
            **job.facts,
            "volumes": volumes,
            "chain": {"sequence": sequence, "previous": link},
            "made_at": now().isoformat(timespec="seconds"),
        }
        root = f"receipt-{job.id}"
        stamp = (lambda statement: None) if self._stamps is None else self._stamps.of
        write_bag(
            work / "tar",
            root=root,
            predicate=predicate,
            plan=job.plan,
            rehearsal=job.rehearsal,
            ledgers=ledgers,
            key=self.key,
            stamp=stamp,
        )
        path = self._folder / f"{sequence:08d}-{job.id}.tar"
        (work / "tar").rename(path)
        sync_folder(self._folder)
        return self._receipt(path)

    def path_of(self, job_id: UUID) -> Path:
        """NotFound."""
        found = self._of(job_id)
        if found is None:
            raise NotFound(
                f"job {job_id} has no receipt on this host",
                hint="a receipt is made where a job completes, unless the setting receipts is off",
            )
        return found

    def content(self, job_id: UUID) -> ReceiptContent:
        """The content of the job's receipt, for people. NotFound, MalformedArchive."""
        try:
            with tarfile.open(self.path_of(job_id)) as tar:
                inner = tar.extractfile(f"receipt-{job_id}/{STATEMENT}")
                statement: dict[str, Any] = json.loads(inner.read() if inner is not None else b"")["predicate"]
                return ReceiptContent(statement, is_stamped=f"receipt-{job_id}/{STAMP}" in tar.getnames())
        except (tarfile.TarError, OSError, ValueError, LookupError) as error:
            raise MalformedArchive(f"the receipt of job {job_id} cannot be read") from error

    def ledgers(self, job_id: UUID) -> dict[str, LedgerSpec]:
        """The files with the disks' hashes, by disk key, for those that have some. NotFound; MalformedArchive, if the receipt
        is not as this host signed it."""
        return ledgers_of(self.path_of(job_id), job_id, self.key.public)

    def published(self) -> ReceiptKey:
        """The host's public key, and the newest receipt of its chain."""
        head = self._head()
        return ReceiptKey(
            host=self.key.host,
            public_key=self.key.public.line,
            fingerprint=self.key.public.fingerprint,
            allowed_signers=self.key.allowed_signers,
            head=None if head is None else self._receipt(head),
        )

    def _names(self) -> list[re.Match[str]]:
        return [found for entry in os.scandir(self._folder) if (found := _NAME.fullmatch(entry.name))]

    def _head(self) -> Path | None:
        newest = max(self._names(), key=lambda found: int(found[1]), default=None)
        return None if newest is None else self._folder / newest[0]

    def _of(self, job_id: UUID) -> Path | None:
        return next((self._folder / found[0] for found in self._names() if found[2] == str(job_id)), None)

    def _receipt(self, path: Path) -> Receipt:
        """MalformedArchive, where the file is damaged: the next receipt cannot name it."""
        found = _NAME.fullmatch(path.name)
        assert found is not None
        try:
            with tarfile.open(path) as tar:
                inner = tar.extractfile(f"receipt-{found[2]}/{STATEMENT}")
                content = inner.read() if inner is not None else b""
            made_at = json.loads(content)["predicate"]["made_at"]
        except (tarfile.TarError, ValueError, LookupError, TypeError) as error:
            raise MalformedArchive(
                f"the receipt {path.name} of this host cannot be read",
                hint="put it back from a copy: each receipt names the one before it",
            ) from error
        return Receipt(sequence=int(found[1]), job_id=UUID(found[2]), sha256=sha256_of(content), made_at=made_at)
