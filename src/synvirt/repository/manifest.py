"""A manifest: what a restore point is. Three lines of text, under points/<id>.point (docs/backup-format.md).

    1  JSON, in the clear: the format, the id, when, and of each disk its size and the names of its pages
    2  base64 of a sealed JSON: the guest's name, its domain's XML, its NVRAM, what the disks are called
    3  BLAKE3 of the two lines above, in hex: anyone can tell that they are whole

Line 1 is the associated data of what line 2 seals, so who has the key knows that both are as they were written. A page is the
names of 1,024 chunks, which are 1 GiB of a disk; the name of a chunk, or a page, that is all zeros is 32 zero bytes.

The last field of what line 2 seals may be a signature, of all that stands before it and of line 1.
"""

import base64
import binascii
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol, TypeVar
from uuid import UUID

from blake3 import blake3
from pydantic import BaseModel, Field, StringConstraints, ValidationError

from synvirt.errors import RepositoryDamaged
from synvirt.model.values import Bytes, Model, Time
from synvirt.repository.keys import CHUNK_BYTES, NAME_BYTES, KeyRing, Keys
from synvirt.sizes import MIB

FOLDER = "points"
SUFFIX = ".point"
FORMAT = 1
PAGE_CHUNKS = 1024
PAGE_BYTES = PAGE_CHUNKS * NAME_BYTES
NONE = bytes(NAME_BYTES)
# A disk of 64 TiB has 4 MiB of page names; a guest has few such disks.
MANIFEST_BYTES_MAX = 64 * MIB
_SIGNATURE = b',"signature":'
# As `written` leaves it: found without reading the JSON that it ends.
_SIGNED = re.compile(rb'\{"key":"([A-Za-z0-9+/=@._ -]{1,1000})","sshsig":"((?:[A-Za-z0-9+/= -]|\\n){1,4000})"\}\}')
# Of manifests that are read at once.
BATCH_BYTES, BATCH_MAX = 8 * MIB, 1000

Read = TypeVar("Read", bound=BaseModel)
Hex = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class DiskMap(Model):
    """A disk of a point: its size in bytes, and the names of its pages in hexadecimal digits."""

    size_bytes: Bytes
    pages: tuple[Hex, ...]


class Shown(Model):
    """Line 1."""

    format: int = FORMAT
    id: UUID
    created_at: Time
    # As many as are sealed: no guest has more, and each is an object in its reader.
    disks: tuple[DiskMap, ...] = Field(max_length=4096)


class Mark(Model):
    """What changes of a disk after the point are counted from: a checkpoint of libvirt's, by its name, or a bookmark of a zfs
    volume, by its name and the guid of the snapshot that it is of."""

    kind: Literal["checkpoint", "bookmark"]
    name: str
    guid: str | None = None


class Named(Model):
    """A disk of the guest: where the domain has it, and the path of its volume then. `mark` is of use to the host that made the
    point alone. `checked_to`: up to which chunk those that had not changed were looked at."""

    target: str
    path: str
    size_bytes: Bytes
    mark: Mark | None = None
    checked_to: int = 0


class Signature(Model):
    """By whom a point was made. `key`: as OpenSSH writes a public one; `sshsig`: the key's signature of `statement`."""

    key: str
    sshsig: str


# Signs a statement; None: nobody does.
Sign = Callable[[str], Signature | None]


class Sealed(Model):
    """Line 2. `nvram` is base64, and so is each file of the TPM's folder in `tpm`, by its name; `disks` are those of line 1, in
    the same order. `freeze_ms`: how long the guest's file systems stood still."""

    vm_id: str
    vm_name: str
    consistency: str
    quiesced: bool = False
    job_id: UUID
    run_id: UUID
    domain_xml: str
    nvram: str | None = None
    tpm: dict[str, str] | None = None
    freeze_ms: int | None = None
    disks: tuple[Named, ...] = Field(max_length=4096)
    signature: Signature | None = None


class Manifest(Model):
    """A restore point: what anyone can read of it, and what the key opens. `sha256`: in hex, of the bytes that were read, as in
    its statement; None: it was not read."""

    shown: Shown
    sealed: Sealed
    sha256: str | None = None

    def read_from(self, one: "Unread") -> "Manifest":
        """With what the bytes themselves show, no matter who parsed them."""
        sealed = self.sealed.model_copy(update={"signature": one.signature})
        return self.model_copy(update={"sealed": sealed, "sha256": one.sha256})


@dataclass(frozen=True, slots=True)
class Unread:
    """A manifest that is whole and decrypted, but not parsed: a `Reading` does that. `inside`: what line 2 seals, as it was
    signed; None, where nobody had the key."""

    point_id: str
    shown: bytes
    inside: bytes | None = None
    signature: Signature | None = None

    @property
    def sha256(self) -> str:
        """In hex, of all that its signature is of."""
        return _digest(self.shown, self.inside or b"")

    @property
    def statement(self) -> bytes:
        """What its signature must be of."""
        return statement(self.point_id, self.sha256)

    @property
    def size_bytes(self) -> int:
        return len(self.shown) + len(self.inside or b"")


class Reading(Protocol):
    """Parses manifests: each becomes what it says, or the error that is wrong with it, in the order given. Manifests may be
    hostile: a service has them parsed by a confined child (jobs/inspecting/points.py)."""

    def manifests(self, many: Sequence[Unread]) -> list[Manifest | RepositoryDamaged]: ...
    def shown(self, many: Sequence[Unread]) -> list[Shown | RepositoryDamaged]: ...


def chunks_of(size_bytes: int) -> int:
    return -(-size_bytes // CHUNK_BYTES)


def names_in(page: bytes) -> Iterator[bytes]:
    """Of the chunks that are not zeros."""
    for at in range(0, len(page), NAME_BYTES):
        if (name := page[at : at + NAME_BYTES]) != NONE:
            yield name


def file_name(point_id: UUID) -> str:
    return f"{FOLDER}/{point_id}{SUFFIX}"


def statement(point_id: UUID | str, digest: str) -> bytes:
    """What is signed. `digest`: SHA-256, in hex, of line 1, a line end, and what line 2 seals without the signature."""
    return f"synvirt restore point {FORMAT}\n{point_id}\n{digest}\n".encode()


def written(manifest: Manifest, keys: Keys | KeyRing, sign: Sign = lambda digest: None) -> bytes:
    """`sign` is given the statement's digest."""
    shown = manifest.shown.model_dump_json().encode()
    inside = manifest.sealed.model_dump_json(exclude={"signature"}).encode()
    if (signature := sign(_digest(shown, inside))) is not None:
        inside = inside[:-1] + _SIGNATURE + signature.model_dump_json().encode() + b"}"
    sealed = keys.seal(inside, belongs_to=shown)
    body = shown + b"\n" + base64.b64encode(sealed) + b"\n"
    return body + blake3(body).hexdigest().encode() + b"\n"


# ── the bytes, before anything is parsed ─────────────────────────────────────────────────────────────────────────────


def unread(point_id: str, content: bytes, keys: Keys | KeyRing | None = None) -> Unread:
    """With `keys` it was written by somebody who has one of them, else by anybody. RepositoryDamaged."""
    lines = content.split(b"\n", 4)
    if len(lines) != 4 or lines[3] or blake3(b"\n".join(lines[:2]) + b"\n").hexdigest().encode() != lines[2]:
        raise _damaged(point_id, "its bytes are not those that were written")
    try:
        sealed = base64.b64decode(lines[1], validate=True)
    except binascii.Error as error:
        raise _damaged(point_id, "it is none of ours") from error
    if keys is None:
        return Unread(point_id, lines[0])
    plain = keys.unseal(sealed, belongs_to=lines[0], what=f"restore point {point_id}")
    before, mark, last = plain.rpartition(_SIGNATURE)
    if not mark:
        return Unread(point_id, lines[0], plain)
    # What is read is what is signed, and nothing else: it stands at the end, once.
    found = _SIGNED.fullmatch(last)
    if found is None or _SIGNATURE in before:
        raise _damaged(point_id, "its signature is not at its end")
    key, sshsig = (part.decode().replace("\\n", "\n") for part in found.groups())
    return Unread(point_id, lines[0], before + b"}", Signature(key=key, sshsig=sshsig))


def in_batches(many: Iterable[Unread]) -> Iterator[list[Unread]]:
    """As many at once as a `Reading` is asked for."""
    batch, size = list[Unread](), 0
    for one in many:
        if batch and (size + one.size_bytes > BATCH_BYTES or len(batch) >= BATCH_MAX):
            yield batch
            batch, size = [], 0
        batch.append(one)
        size += one.size_bytes
    if batch:
        yield batch


def _digest(shown: bytes, inside: bytes) -> str:
    return hashlib.sha256(shown + b"\n" + inside).hexdigest()


# ── what it says ─────────────────────────────────────────────────────────────────────────────────────────────────────


class _Here:
    """Parses in this process: a worker, which is confined, or the command line."""

    def manifests(self, many: Sequence[Unread]) -> list[Manifest | RepositoryDamaged]:
        return [_or_wrong(read, one) for one in many]

    def shown(self, many: Sequence[Unread]) -> list[Shown | RepositoryDamaged]:
        return [_or_wrong(read_shown, one) for one in many]


HERE = _Here()


def _or_wrong(read: Callable[[Unread], Read], one: Unread) -> Read | RepositoryDamaged:
    try:
        return read(one)
    except RepositoryDamaged as error:
        return error


def read_shown(one: Unread) -> Shown:
    """What anyone can read. RepositoryDamaged."""
    point_id = one.point_id
    try:
        shown = Shown.model_validate_json(one.shown)
    except ValidationError as error:
        raise _damaged(point_id, "it is none of ours") from error
    if shown.format != FORMAT:
        raise _damaged(point_id, f"its format is {shown.format}, and this version reads {FORMAT}")
    if str(shown.id) != point_id:
        raise _damaged(point_id, f"it is that of {shown.id} under another's name")
    if any(len(disk.pages) != -(-chunks_of(disk.size_bytes) // PAGE_CHUNKS) for disk in shown.disks):
        raise _damaged(point_id, "a disk's pages do not fit its size")
    return shown


def read(one: Unread) -> Manifest:
    """RepositoryDamaged."""
    shown = read_shown(one)
    try:
        inside = Sealed.model_validate_json(one.inside or b"")
    except ValidationError as error:
        raise _damaged(one.point_id, "what it seals is not complete") from error
    if inside.signature is not None:
        raise _damaged(one.point_id, "its signature is not at its end")
    if [disk.size_bytes for disk in inside.disks] != [disk.size_bytes for disk in shown.disks]:
        raise _damaged(one.point_id, "its disks are not those that it seals")
    return Manifest(shown=shown, sealed=inside).read_from(one)


def _damaged(point_id: str, why: str) -> RepositoryDamaged:
    return RepositoryDamaged(f"the manifest of restore point {point_id} is damaged: {why}")


def sound(found: Read | RepositoryDamaged) -> Read:
    """What a `Reading` has read. RepositoryDamaged, where that is what it says."""
    if isinstance(found, RepositoryDamaged):
        raise found
    return found
