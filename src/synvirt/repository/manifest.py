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
from collections.abc import Callable, Iterator
from typing import Annotated, Literal
from uuid import UUID

from blake3 import blake3
from pydantic import Field, StringConstraints, ValidationError

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
    """A restore point: what anyone can read of it, and what the key opens."""

    shown: Shown
    sealed: Sealed


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


def shown_of(point_id: str, content: bytes) -> Shown:
    """What anyone can read, checked against line 3. RepositoryDamaged."""
    return _parsed(point_id, content)[0]


def opened(point_id: str, content: bytes, keys: Keys | KeyRing) -> Manifest:
    """RepositoryDamaged."""
    shown, line, sealed = _parsed(point_id, content)
    plain = keys.unseal(sealed, belongs_to=line, what=f"restore point {point_id}")
    try:
        inside = Sealed.model_validate_json(plain)
    except ValidationError as error:
        raise _damaged(point_id, "what it seals is not complete") from error
    if [one.size_bytes for one in inside.disks] != [one.size_bytes for one in shown.disks]:
        raise _damaged(point_id, "its disks are not those that it seals")
    return Manifest(shown=shown, sealed=inside)


def signed(point_id: str, content: bytes, keys: Keys | KeyRing) -> tuple[Signature | None, bytes]:
    """The signature as it stands there, unchecked, and the statement that it must be of. RepositoryDamaged."""
    signature = opened(point_id, content, keys).sealed.signature
    _, line, sealed = _parsed(point_id, content)
    plain = keys.unseal(sealed, belongs_to=line, what=f"restore point {point_id}")
    if signature is None:
        return None, statement(point_id, _digest(line, plain))
    before, _, last = plain.rpartition(_SIGNATURE)
    # Of what somebody else wrote, what is signed must be what is read: nothing stands behind it, or in it a second time.
    try:
        whole = Sealed.model_validate_json(before + b"}")
        alone = Signature.model_validate_json(last[:-1])
    except ValidationError as error:
        raise _damaged(point_id, "its signature is not at its end") from error
    if whole.model_copy(update={"signature": alone}) != Sealed.model_validate_json(plain) or whole.signature is not None:
        raise _damaged(point_id, "its signature is not of all of it")
    return signature, statement(point_id, _digest(line, before + b"}"))


def _digest(shown: bytes, inside: bytes) -> str:
    return hashlib.sha256(shown + b"\n" + inside).hexdigest()


def _parsed(point_id: str, content: bytes) -> tuple[Shown, bytes, bytes]:
    lines = content.split(b"\n")
    if len(lines) != 4 or lines[3] or blake3(b"\n".join(lines[:2]) + b"\n").hexdigest().encode() != lines[2]:
        raise _damaged(point_id, "its bytes are not those that were written")
    try:
        shown = Shown.model_validate_json(lines[0])
        sealed = base64.b64decode(lines[1], validate=True)
    except (ValidationError, binascii.Error) as error:
        raise _damaged(point_id, "it is none of ours") from error
    if shown.format != FORMAT:
        raise _damaged(point_id, f"its format is {shown.format}, and this version reads {FORMAT}")
    if str(shown.id) != point_id:
        raise _damaged(point_id, f"it is that of {shown.id} under another's name")
    if any(len(disk.pages) != -(-chunks_of(disk.size_bytes) // PAGE_CHUNKS) for disk in shown.disks):
        raise _damaged(point_id, "a disk's pages do not fit its size")
    return shown, lines[0], sealed


def _damaged(point_id: str, why: str) -> RepositoryDamaged:
    return RepositoryDamaged(f"the manifest of restore point {point_id} is damaged: {why}")
