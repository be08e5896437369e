"""Checks a receipt without trusting it, and names everything that is wrong with it.

    checked(folder)                 files, hashes, signatures, and what the statement says of them
    differing(folder, disk, volume) the blocks of a volume that differ from the receipt
    chained(folder of receipts)     a receipt that is missing, or was put in another's place

The files may come from anyone: only plain files with names that a receipt has, of a limited size, are opened.
"""

import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from synvirt.blocks import DiskReader
from synvirt.disks.checking.block_hashes import digest_of
from synvirt.disks.checking.ledger import BLOCK_BYTES, Ledger, Row
from synvirt.disks.checking.receipt_rows import LINE_BYTES, rows_of
from synvirt.disks.memory import is_zero
from synvirt.errors import MalformedArchive, NotFound
from synvirt.proof.bag import (
    DECLARATION,
    DECLARED,
    ENVELOPE,
    MANIFEST,
    PLAN,
    PREDICATE_TYPE,
    SIGNATURE,
    SIGNERS,
    STAMP,
    STATEMENT,
    STATEMENT_TYPE,
    TAG_MANIFEST,
    sha256_of,
)
from synvirt.proof.signing import PublicKey
from synvirt.proof.stamping import stamped_at
from synvirt.sizes import MIB

# The files of a plan with a thousand disks have some hundreds of kilobytes. A ledger is read line by line.
SMALL_BYTES: Final = 16 * MIB
# Decades of a fleet's receipts; each is a folder with some files.
RECEIPTS_MAX: Final = 1_000_000
_TAGS = (DECLARATION, MANIFEST, SIGNERS, SIGNATURE, ENVELOPE)
_LISTED = re.compile(r"([0-9a-f]{64})  (data/[A-Za-z0-9._-]{1,128}|[a-z0-9._-]{1,64})")
_PIECE_BYTES = MIB


@dataclass(frozen=True, slots=True)
class Checked:
    """`problems`: empty, if all is as it was signed. `statement` is None, if it cannot be read."""

    statement: dict[str, Any] | None
    key: PublicKey | None
    problems: tuple[str, ...]


def stamped(folder: Path, roots: Path | None) -> str | None:
    """The moment at which an authority (RFC 3161) has seen the statement; None: there is no stamp. `roots`: a PEM file of the
    trusted roots; None: the authority is not checked. MalformedArchive."""
    if not os.path.lexists(folder / STAMP):
        return None
    return stamped_at(_small(folder, STATEMENT), _small(folder, STAMP), roots)


def checked(folder: Path, key: PublicKey | None = None) -> Checked:
    """Checks the receipt. `key`: the host's key, from a place that the reader trusts; None: the one in the folder, which
    anyone may have put there. NotFound, if there is no receipt."""
    if not (folder / STATEMENT).exists() and not (folder / DECLARATION).exists():
        raise NotFound(f"{folder.name} has no receipt", hint="name the folder with bagit.txt in it")
    problems: list[str] = []

    def tried(check: Callable[[], None]) -> None:
        try:
            check()
        except MalformedArchive as error:
            problems.append(error.detail)

    statement: dict[str, Any] | None = None
    found_key = key
    listed = _listed(folder, MANIFEST, problems)
    tags = _listed(folder, TAG_MANIFEST, problems)
    problems += [f"{name} is not listed in {TAG_MANIFEST}" for name in _TAGS if name not in tags]
    problems += [f"{name} is not listed in {MANIFEST}" for name in _in_data(folder) if name not in listed]
    problems += [f"{name} is not listed in {MANIFEST}" for name in (STATEMENT, PLAN) if name not in listed]
    tried(lambda: _check_declaration(folder))
    try:
        content = _small(folder, STATEMENT)
        statement = statement_of(content)
        in_folder = PublicKey.from_signers(_text(folder, SIGNERS))
        found_key = key or in_folder
        if in_folder != found_key:
            problems.append(f"{SIGNERS} has the key {in_folder.fingerprint}, not {found_key.fingerprint}")
        tried(lambda: found_key.check_sshsig(content, _text(folder, SIGNATURE), SIGNATURE))
        tried(lambda: found_key.check_dsse(content, _text(folder, ENVELOPE), ENVELOPE))
        tried(lambda: _check_subjects(statement, listed))
    except MalformedArchive as error:
        problems.append(error.detail)
    if statement is not None:
        for disk in volumes(statement):
            name = disk.get("ledger")
            # One that is not listed is among the problems already.
            if name is not None and (not isinstance(name, str) or name in listed):
                tried(lambda: _check_rows(folder, disk))  # noqa: B023
    return Checked(statement, found_key, tuple(dict.fromkeys(problems)))


def volumes(statement: dict[str, Any]) -> list[dict[str, Any]]:
    """The volumes that a statement names. Malformed entries are left out."""
    found = statement["predicate"].get("volumes")
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def differing(
    folder: Path, disk: dict[str, Any], volume: DiskReader, on_block: Callable[[int], None] = lambda _: None
) -> Iterator[int]:
    """The numbers of the 4 MiB blocks that differ from the receipt for this disk. MalformedArchive, DiskReadFailed."""
    size = size_of(disk)
    if volume.size < size:
        raise MalformedArchive(f"the volume has {volume.size} bytes, the receipt's {disk.get('key')} {size}")
    buffer = memoryview(bytearray(min(size, BLOCK_BYTES)))
    for number, row in enumerate(_rows(folder, disk)):
        view = buffer[: row.length]
        volume.read_into(row.start, view)
        if (None if is_zero(view) else digest_of(view)) != row.digest:
            yield number
        on_block(number)


def ledger_of_volume(folder: Path, disk: dict[str, Any]) -> Ledger:
    """The receipt's ledger of this disk, in the form for `synvirt disk verify`. MalformedArchive."""
    return Ledger(str(disk.get("key")), size_of(disk), _rows(folder, disk))


def chained(folder: Path, key: PublicKey | None = None, receipt: Path | None = None) -> list[str]:
    """What is wrong with the receipts in the folder, each in a folder of its own: one missing, one twice, one of another chain.
    Each is checked as by `checked`. `receipt`: the folder of one that must be among them. Only the host can say whether the
    newest is really the newest (GET /receipts/key)."""
    problems: list[str] = []
    links: dict[int, _Link] = {}
    for place in sorted(folder.iterdir())[:RECEIPTS_MAX]:
        if place.is_symlink() or not place.is_dir() or not (place / DECLARATION).exists():
            continue
        found = checked(place, key)
        problems += [f"{place.name}: {problem}" for problem in found.problems]
        key = key or found.key
        if found.statement is None:
            continue
        sequence, previous = _link(found.statement, place.name, problems)
        if sequence in links:
            problems.append(f"{place.name} and {links[sequence].name} are both receipt {sequence}")
        links[sequence] = _Link(place.name, _statement_hash(place), previous)
    if not links:
        raise NotFound(f"{folder.name} has no receipts", hint="name the folder that the folders receipt-… lie in")
    if receipt is not None and _statement_hash(receipt) not in {link.digest for link in links.values()}:
        problems.append(f"{receipt.name} is not among the receipts in {folder.name}: its place in their chain was not checked")
    return [*problems, *_broken(links)]


# ── the parts ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _statement_hash(folder: Path) -> str:
    return sha256_of(_small(folder, STATEMENT))


class _Link(NamedTuple):
    """A receipt's place in the chain: its folder's name, the hash of its statement, and what it says of the one before it."""

    name: str
    digest: str
    previous: dict[str, Any] | None


def _broken(links: dict[int, _Link]) -> Iterator[str]:
    """Where the chain of at least one receipt, by their numbers, has a gap or another order."""
    last = max(links)
    if last > RECEIPTS_MAX:
        yield f"{links[last].name} says that it is receipt {last}"
        return
    for sequence in range(1, last + 1):
        link, before = links.get(sequence), links.get(sequence - 1)
        if link is None:
            yield f"receipt {sequence} is missing"
        # Receipt 0 is one without a place in the chain: nothing follows it.
        elif sequence > 1 and before is not None and link.previous != {"sequence": sequence - 1, "sha256": before.digest}:
            yield f"{link.name} does not follow {before.name}: it names another statement before it"


def _link(statement: dict[str, Any], name: str, problems: list[str]) -> tuple[int, dict[str, Any] | None]:
    chain = statement["predicate"].get("chain")
    sequence = chain.get("sequence") if isinstance(chain, dict) else None
    if not isinstance(chain, dict) or type(sequence) is not int or sequence < 1:
        problems.append(f"{name} has no place in the chain")
        return 0, None
    return sequence, chain.get("previous")


def _listed(folder: Path, manifest: str, problems: list[str]) -> dict[str, str]:
    """The files that a manifest lists. Files that differ from it go to the problems."""
    found: dict[str, str] = {}
    try:
        # Not splitlines(): it also ends a line at other characters, and a damaged line feed may be one of them.
        *lines, rest = _text(folder, manifest).split("\n")
        if rest:
            problems.append(f"{manifest}, line {len(lines) + 1} has no end")
        for number, line in enumerate(lines, 1):
            match = _LISTED.fullmatch(line)
            if match is None or match[2] in found or (match[2].startswith("data/") != (manifest == MANIFEST)):
                problems.append(f"{manifest}, line {number} is none of a receipt's manifest")
            else:
                found[match[2]] = match[1]
    except MalformedArchive as error:
        problems.append(error.detail)
    for name, digest in found.items():
        try:
            if _hash_of(folder, name) != digest:
                problems.append(f"{name} is not what {manifest} says: its SHA-256 differs")
        except MalformedArchive as error:
            problems.append(error.detail)
    return found


def _in_data(folder: Path) -> list[str]:
    try:
        return sorted(f"data/{entry.name}" for entry in os.scandir(folder / "data"))
    except OSError:
        return []


def _check_declaration(folder: Path) -> None:
    if _text(folder, DECLARATION) != DECLARED:
        raise MalformedArchive(f"{DECLARATION} declares no BagIt 1.0 in UTF-8")


def statement_of(content: bytes) -> dict[str, Any]:
    """The statement, as it was signed. MalformedArchive, if it is not a receipt's."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        value = None
    ours = isinstance(value, dict) and (value.get("_type"), value.get("predicateType")) == (STATEMENT_TYPE, PREDICATE_TYPE)
    if not ours or not isinstance(value.get("predicate"), dict) or not isinstance(value.get("subject"), list):
        raise MalformedArchive(f"{STATEMENT} is not a statement of a receipt")
    statement: dict[str, Any] = value
    return statement


def _check_subjects(statement: dict[str, Any], listed: dict[str, str]) -> None:
    """Checks that the statement has the manifest's digests of all files in data/ except itself."""
    wanted = {PLAN, *(disk["ledger"] for disk in volumes(statement) if isinstance(disk.get("ledger"), str))}
    try:
        signed = {one["name"]: one["digest"]["sha256"] for one in statement["subject"]}
        names = sorted(wanted | signed.keys() | (listed.keys() - {STATEMENT}))
    except (TypeError, LookupError):  # an unhashable name, or one that is no text
        raise MalformedArchive(f"{STATEMENT}: its subjects have no SHA-256") from None
    for name in names:
        if name not in signed:
            raise MalformedArchive(f"{name} is not among what {STATEMENT} signs")
        if listed.get(name) != signed[name]:
            raise MalformedArchive(f"{name} is not what {STATEMENT} says: its SHA-256 differs")


def _check_rows(folder: Path, disk: dict[str, Any]) -> None:
    for _ in _rows(folder, disk):
        pass


def size_of(disk: dict[str, Any]) -> int:
    """The size in bytes of a disk that has a ledger. MalformedArchive."""
    size = disk.get("size_bytes")
    if type(size) is not int or size < 0 or disk.get("block_bytes") != BLOCK_BYTES:
        raise MalformedArchive(f"{STATEMENT}: volume {disk.get('key')} has no size, or other blocks than {BLOCK_BYTES} bytes")
    return size


def _rows(folder: Path, disk: dict[str, Any]) -> Iterator[Row]:
    name = disk.get("ledger")
    if not isinstance(name, str) or not _LISTED.fullmatch(f"{'0' * 64}  {name}"):
        raise MalformedArchive(f"the receipt has no hashes of {disk.get('key')}: {disk.get('reason') or 'it gives no reason'}")
    with _opened(folder, name) as file:
        yield from rows_of(iter(lambda: file.readline(LINE_BYTES), b""), name, size_of(disk))


def _opened(folder: Path, name: str) -> Any:
    try:
        descriptor = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise MalformedArchive(f"{name} cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise MalformedArchive(f"{name} is not a plain file")
    return os.fdopen(descriptor, "rb")


def _small(folder: Path, name: str) -> bytes:
    with _opened(folder, name) as file:
        content: bytes = file.read(SMALL_BYTES + 1)
    if len(content) > SMALL_BYTES:
        raise MalformedArchive(f"{name} has over {SMALL_BYTES} bytes")
    return content


def _text(folder: Path, name: str) -> str:
    try:
        return _small(folder, name).decode()
    except UnicodeDecodeError:
        raise MalformedArchive(f"{name} is not text in UTF-8") from None


def _hash_of(folder: Path, name: str) -> str:
    hashed = hashlib.sha256()
    with _opened(folder, name) as file:
        while piece := file.read(_PIECE_BYTES):
            hashed.update(piece)
    return hashed.hexdigest()
