"""The folder of a receipt, written as a tar: BagIt 1.0 (RFC 8493) around an in-toto Statement v1.

A ledger has a row for each 4 MiB of a volume, `HEX  NUMBER`: a loop of `dd bs=4M skip=NUMBER count=1 | sha256sum` checks it.
Its SHA-256, the plan's and the rehearsal's are the statement's subjects, and the statement is what is signed.
"""

import hashlib
import io
import json
import os
import tarfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from synvirt.proof.signing import HostKey

STATEMENT, PLAN, REHEARSAL = "data/statement.json", "data/plan.json", "data/rehearsal.json"
SIGNATURE, ENVELOPE, SIGNERS = "statement.json.sig", "receipt.dsse.json", "allowed_signers"
STAMP = "statement.tsr"
DECLARATION, MANIFEST, TAG_MANIFEST = "bagit.txt", "manifest-sha256.txt", "tagmanifest-sha256.txt"
DECLARED: Final = "BagIt-Version: 1.0\nTag-File-Character-Encoding: UTF-8\n"
STATEMENT_TYPE: Final = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE: Final = "urn:synvirt:receipt:v1"
TEST_RESULT_TYPE: Final = "https://in-toto.io/attestation/test-result/v0.1"


@dataclass(frozen=True, slots=True)
class Ledger:
    """The ledger of one volume: `name` in the folder, and the file with its rows."""

    name: str
    file: Path
    sha256: str


def write_ledger(name: str, digests: Iterable[bytes], file: Path) -> Ledger:
    """Writes the ledger. `digests`: SHA-256 of each block, in order."""
    hashed = hashlib.sha256()
    with file.open("wb") as out:
        for number, digest in enumerate(digests):
            row = f"{digest.hex()}  {number}\n".encode()
            hashed.update(row)
            out.write(row)
    return Ledger(name, file, hashed.hexdigest())


def write_bag(
    out: Path,
    *,
    root: str,
    predicate: Mapping[str, Any],
    plan: bytes,
    rehearsal: bytes | None = None,
    ledgers: Iterable[Ledger],
    key: HostKey,
    stamp: Callable[[bytes], bytes | None] = lambda statement: None,
) -> str:
    """Writes the tar at `out`, durable, and returns the SHA-256 of its statement, which the next receipt names. `rehearsal`:
    the result of the last one, if there was one. `stamp`: makes a time stamp (RFC 3161), or none."""
    ledgers = list(ledgers)
    files = {PLAN: plan} | ({} if rehearsal is None else {REHEARSAL: rehearsal})
    data = {name: sha256_of(content) for name, content in files.items()} | {ledger.name: ledger.sha256 for ledger in ledgers}
    statement = as_json(
        {
            "_type": STATEMENT_TYPE,
            "subject": [{"name": name, "digest": {"sha256": digest}} for name, digest in sorted(data.items())],
            "predicateType": PREDICATE_TYPE,
            "predicate": dict(predicate),
        }
    )
    data[STATEMENT] = sha256_of(statement)
    tags = {
        DECLARATION: DECLARED.encode(),
        MANIFEST: _manifest(data),
        SIGNERS: key.allowed_signers.encode(),
        SIGNATURE: key.sshsig(statement).encode(),
        ENVELOPE: key.dsse(statement).encode(),
    }
    if (stamped := stamp(statement)) is not None:
        tags[STAMP] = stamped
    tags[TAG_MANIFEST] = _manifest({name: sha256_of(content) for name, content in tags.items()})
    with out.open("wb") as file:
        with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for name, content in (*tags.items(), (STATEMENT, statement), *files.items()):
                tar.addfile(_member(f"{root}/{name}", len(content)), io.BytesIO(content))
            for ledger in ledgers:
                with ledger.file.open("rb") as rows:
                    tar.addfile(_member(f"{root}/{ledger.name}", os.fstat(rows.fileno()).st_size), rows)
        file.flush()
        os.fsync(file.fileno())
    return data[STATEMENT]


def rehearsal_result(plan: bytes, *, passed: bool, checks: Iterable[tuple[str, bool]]) -> bytes:
    """A rehearsal's result as an in-toto Statement. `checks`: the name of each, and whether it was passed."""
    results = list(checks)
    tested = {"name": PLAN, "digest": {"sha256": sha256_of(plan)}}
    return as_json(
        {
            "_type": STATEMENT_TYPE,
            "subject": [tested],
            "predicateType": TEST_RESULT_TYPE,
            "predicate": {
                "result": "PASSED" if passed else "FAILED",
                "configuration": [tested],
                "passedTests": [name for name, ok in results if ok],
                "failedTests": [name for name, ok in results if not ok],
            },
        }
    )


def as_json(value: object) -> bytes:
    return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode()


def sha256_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _manifest(digests: Mapping[str, str]) -> bytes:
    return "".join(f"{digest}  {name}\n" for name, digest in sorted(digests.items())).encode()


def _member(name: str, size: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.size, member.mode = size, 0o644
    return member
