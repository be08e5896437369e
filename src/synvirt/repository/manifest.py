"""A manifest describes a restore point. Three lines of text, under points/<id>.point (docs/backup-format.md).

    1  JSON, in the clear: the format, the id, the time, and for each disk its size and the names of its pages
    2  base64 of a sealed JSON: the guest's name, its domain's XML, its NVRAM, the names of the disks
    3  BLAKE3 of the two lines above, in hex: anyone can check that they are whole

Line 1 is the associated data of line 2's seal, so a holder of the key can check that both are as they were written. A page has
the names of 1,024 chunks, which are 1 GiB of a disk. The name of a chunk or page that is all zeros is 32 zero bytes.

The last field of line 2's sealed JSON may be a signature of all that is before it, and of line 1.
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

from synvirt.errors import RepositoryDamaged, SynvirtError
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
# In the form that `written` makes: it is found without reading the JSON that it ends.
_SIGNED = re.compile(rb'\{"key":"([A-Za-z0-9+/=@._ -]{1,1000})","sshsig":"((?:[A-Za-z0-9+/= -]|\\n){1,4000})"\}\}')
# Limits of manifests that are read at once.
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
    # As many as in the sealed part: no guest has more, and each costs its reader an object.
    disks: tuple[DiskMap, ...] = Field(max_length=4096)


class Mark(Model):
    """The point from which later changes of a disk are counted: the name of a checkpoint of libvirt, or the name of a bookmark
    of a zfs volume and the guid of its snapshot."""

    kind: Literal["checkpoint", "bookmark"]
    name: str
    guid: str | None = None


class Named(Model):
    """A disk of the guest: its place in the domain, and the path of its volume then. `mark` is useful only to the host that
    made the point. `checked_to`: up to which chunk the unchanged ones were checked."""

    target: str
    path: str
    size_bytes: Bytes
    mark: Mark | None = None
    checked_to: int = 0


class Signature(Model):
    """The maker of a point. `key`: the public key in OpenSSH's form; `sshsig`: the key's signature of `statement`."""

    key: str
    sshsig: str


# Signs a statement; None: there is no signer.
Sign = Callable[[str], Signature | None]


class Sealed(Model):
    """Line 2. `nvram` is base64, and so is each file of the TPM's folder in `tpm`, by its name; `disks` are those of line 1, in
    the same order. `freeze_ms`: how long the guest's file systems were frozen."""

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
    """A restore point: its public part, and the part that the key opens. `sha256`: in hex, of the bytes that were read, as in
    its statement; None: it was not read."""

    shown: Shown
    sealed: Sealed
    sha256: str | None = None

    def read_from(self, one: "Unread") -> "Manifest":
        """The manifest, with the facts of its bytes, whatever parsed them."""
        sealed = self.sealed.model_copy(update={"signature": one.signature})
        return self.model_copy(update={"sealed": sealed, "sha256": one.sha256})


@dataclass(frozen=True, slots=True)
class Unread:
    """A manifest that is whole and decrypted, but not parsed: a `Reading` does that. `inside`: the sealed part of line 2, as
    signed; None, where no key was given."""

    point_id: str
    shown: bytes
    inside: bytes | None = None
    signature: Signature | None = None

    @property
    def sha256(self) -> str:
        """In hex, of all that it signs."""
        return _digest(self.shown, self.inside or b"")

    @property
    def statement(self) -> bytes:
        """The text that its signature must be of."""
        return statement(self.point_id, self.sha256)

    @property
    def size_bytes(self) -> int:
        return len(self.shown) + len(self.inside or b"")


class Reading(Protocol):
    """Parses manifests: gives each one's content, or its error, in the given order: RepositoryDamaged, or another that says
    nothing of it. Manifests may be hostile: a service lets a confined child parse them (jobs/inspecting/points.py)."""

    def manifests(self, many: Sequence[Unread]) -> list[Manifest | SynvirtError]: ...
    def shown(self, many: Sequence[Unread]) -> list[Shown | SynvirtError]: ...


def chunks_of(size_bytes: int) -> int:
    return -(-size_bytes // CHUNK_BYTES)


def names_in(page: bytes) -> Iterator[bytes]:
    """The names of the chunks that are not zeros."""
    for at in range(0, len(page), NAME_BYTES):
        if (name := page[at : at + NAME_BYTES]) != NONE:
            yield name


def file_name(point_id: UUID) -> str:
    return f"{FOLDER}/{point_id}{SUFFIX}"


def statement(point_id: UUID | str, digest: str) -> bytes:
    """The text that is signed. `digest`: SHA-256, in hex, of line 1, a line end, and the sealed part of line 2 without the
    signature."""
    return f"synvirt restore point {FORMAT}\n{point_id}\n{digest}\n".encode()


def written(manifest: Manifest, keys: Keys | KeyRing, sign: Sign = lambda digest: None) -> bytes:
    """`sign` gets the statement's digest."""
    shown = manifest.shown.model_dump_json().encode()
    inside = manifest.sealed.model_dump_json(exclude={"signature"}).encode()
    if (signature := sign(_digest(shown, inside))) is not None:
        inside = inside[:-1] + _SIGNATURE + signature.model_dump_json().encode() + b"}"
    sealed = keys.seal(inside, belongs_to=shown)
    body = shown + b"\n" + base64.b64encode(sealed) + b"\n"
    return body + blake3(body).hexdigest().encode() + b"\n"


# ── the bytes, before anything is parsed ─────────────────────────────────────────────────────────────────────────────


def unread(point_id: str, content: bytes, keys: Keys | KeyRing | None = None) -> Unread:
    """With `keys` it checks that a holder of one of them wrote it; else anybody may have. RepositoryDamaged."""
    lines = content.split(b"\n", 4)
    if len(lines) != 4 or lines[3] or blake3(b"\n".join(lines[:2]) + b"\n").hexdigest().encode() != lines[2]:
        raise _damaged(point_id, "its bytes are not those that were written")
    try:
        sealed = base64.b64decode(lines[1], validate=True)
    except binascii.Error as error:
        raise _damaged(point_id, "it was not made by SynVirt") from error
    if keys is None:
        return Unread(point_id, lines[0])
    plain = keys.unseal(sealed, belongs_to=lines[0], what=f"restore point {point_id}")
    before, mark, last = plain.rpartition(_SIGNATURE)
    if not mark:
        return Unread(point_id, lines[0], plain)
    # Only what was signed is read: the signature is at the end, once.
    found = _SIGNED.fullmatch(last)
    if found is None or _SIGNATURE in before:
        raise _damaged(point_id, "its signature is not at its end")
    key, sshsig = (part.decode().replace("\\n", "\n") for part in found.groups())
    return Unread(point_id, lines[0], before + b"}", Signature(key=key, sshsig=sshsig))


def in_batches(many: Iterable[Unread]) -> Iterator[list[Unread]]:
    """In batches of the size for a `Reading`."""
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


# ── its content ──────────────────────────────────────────────────────────────────────────────────────────────────────


class _Here:
    """Parses in this process: in a confined worker, or in the command line."""

    def manifests(self, many: Sequence[Unread]) -> list[Manifest | SynvirtError]:
        return [_or_wrong(read, one) for one in many]

    def shown(self, many: Sequence[Unread]) -> list[Shown | SynvirtError]:
        return [_or_wrong(read_shown, one) for one in many]


HERE = _Here()


def _or_wrong(read: Callable[[Unread], Read], one: Unread) -> Read | SynvirtError:
    try:
        return read(one)
    except RepositoryDamaged as error:
        return error


def read_shown(one: Unread) -> Shown:
    """The public part. RepositoryDamaged."""
    point_id = one.point_id
    try:
        shown = Shown.model_validate_json(one.shown)
    except ValidationError as error:
        raise _damaged(point_id, "it was not made by SynVirt") from error
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


def sound(found: Read | SynvirtError) -> Read:
    """The content that a `Reading` has read. Raises its error, if that is the result."""
    if isinstance(found, SynvirtError):
        raise found
    return found
