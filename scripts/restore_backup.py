#!/usr/bin/env python3
"""Restores a point from a bare copy of a backup repository. Needs the recovery key, and blake3, cryptography and zstandard.

    pip install blake3 cryptography zstandard
    python3 restore_backup.py REPOSITORY                     the points in it
    python3 restore_backup.py REPOSITORY POINT FOLDER        its disks, raw, and its domain's XML, into FOLDER

The recovery key is asked for, or read from the variable SYNVIRT_RECOVERY_KEY. It shares no code with SynVirt, on purpose: it is
the format's second opinion (docs/backup-format.md), and what is left when the service is not.

Of each point it says whose key signed it. Whose host's key that is only that host can say: `synvirt receipt key`.
"""

import base64
import getpass
import hashlib
import json
import os
import struct
import sys
from pathlib import Path

import zstandard
from blake3 import blake3
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

CHUNK_BYTES, NAME_BYTES = 1 << 20, 32
ZEROS = bytes(NAME_BYTES)
ENTRY, END = struct.Struct("<32sBQII32s"), struct.Struct("<I32s8s")
CONTEXT = "synvirt backup 1 "


def master_key(text: str) -> bytes:
    letters = "".join(text.split()).replace("-", "").upper()
    found = base64.b32decode(letters + "=" * (-len(letters) % 8))
    key, check = found[:32], found[32:]
    if len(found) != 34 or hashlib.sha256(b"synvirt backup 1" + key).digest()[:2] != check:
        sys.exit("this is not a recovery key")
    return key


def strings(raw: bytes) -> list[bytes]:
    found = []
    while raw:
        (length,) = struct.unpack_from(">I", raw)
        found.append(raw[4 : 4 + length])
        raw = raw[4 + length :]
    return found


def string(value: bytes) -> bytes:
    return struct.pack(">I", len(value)) + value


def must(holds: bool) -> None:
    if not holds:
        raise ValueError


def author(name: str, point: str, shown: bytes, plain: bytes, inside: dict) -> str:
    signature = inside.get("signature")
    if signature is None:
        return "not signed"
    before, _, last = plain.rpartition(b',"signature":')
    try:
        must(json.loads(before + b"}") | {"signature": json.loads(last[:-1])} == inside)
        digest = hashlib.sha256(shown + b"\n" + before + b"}").hexdigest()
        message = f"synvirt restore point 1\n{point}\n{digest}\n".encode()
        blob = base64.b64decode(signature["key"].split(" ")[1], validate=True)
        raw = base64.b64decode("".join(signature["sshsig"].split("\n")[1:-2]), validate=True)
        key, purpose, _, algorithm, made = strings(raw[10:])
        must(raw[:10] == b"SSHSIG\0\0\0\1" and (key, purpose, algorithm) == (blob, b"synvirt-backup", b"sha512"))
        signed = b"SSHSIG" + b"".join(map(string, (purpose, b"", algorithm, hashlib.sha512(message).digest())))
        Ed25519PublicKey.from_public_bytes(strings(blob)[1]).verify(strings(made)[1], signed)
    except (ValueError, LookupError, TypeError, struct.error, InvalidSignature):
        sys.exit(f"{name} is not what its author signed")
    return "signed by SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


class Key:
    def __init__(self, master: bytes) -> None:
        self.chunk_key, self.page_key, encryption, check = (
            blake3(master, derive_key_context=CONTEXT + what).digest()
            for what in ("chunk names", "page names", "encryption", "check")
        )
        self.gcm, self.check = AESGCM(encryption), check.hex()


class Repository:
    def __init__(self, folder: Path, master: bytes) -> None:
        self.folder = folder
        header = json.loads((folder / "repository").read_bytes().split(b"\n")[0])
        if header["format"] != 1:
            sys.exit("the repository is of another format")
        self.keys = [Key(master)]
        while (key := self.keys[-1]).check != header["key_check"]:  # it was changed since the repository was made
            change = folder / "keys" / key.check
            if not change.is_file() or len(self.keys) > 100:
                sys.exit("the key does not belong to the repository")
            sealed = base64.b64decode(json.loads(change.read_bytes())["before"])
            self.keys.append(Key(key.gcm.decrypt(sealed[:12], sealed[12:], b"the key before " + key.check.encode())))
        self.places = {}
        for path in sorted((folder / "packs").glob("*.pack")):
            self.read_footer(path)

    def read_footer(self, path: Path) -> None:
        with path.open("rb") as file:
            size = path.stat().st_size
            file.seek(max(size - END.size, 0))
            tail = file.read()
            length, digest, magic = END.unpack(tail) if len(tail) == END.size else (0, b"", b"")
            file.seek(max(size - END.size - length, 0))
            footer = file.read(length)
        if magic != b"SVPEND1\n" or blake3(footer).digest() != digest:
            print(f"{path.name} is damaged, and left out", file=sys.stderr)
            return
        for name, kind, offset, length, content_length, frame_hash in ENTRY.iter_unpack(footer):
            self.places[name, kind] = path, offset, length, content_length, frame_hash

    def frame(self, name: bytes, kind: int) -> tuple[bytes, int]:
        if (name, kind) not in self.places:
            sys.exit(f"{name.hex()} is in no pack")
        path, offset, length, content_length, frame_hash = self.places[name, kind]
        with path.open("rb") as file:
            file.seek(offset)
            frame = file.read(length)
        if blake3(frame).digest() != frame_hash:
            sys.exit(f"{path.name} is damaged at {offset}")
        return frame, content_length

    def opened(self, sealed: bytes, belongs_to: bytes) -> bytes:
        for key in self.keys:
            try:
                return key.gcm.decrypt(sealed[:12], sealed[12:], belongs_to)
            except InvalidTag:
                continue
        sys.exit("no key of the repository opens it: it is damaged")

    def chunk(self, name: bytes) -> bytes:
        frame, length = self.frame(name, 0)
        plain = self.opened(frame, name)
        content = plain[1:] if plain[0] == 0 else zstandard.ZstdDecompressor().decompress(plain[1:], max_output_size=length)
        if all(blake3(content, key=key.chunk_key).digest() != name for key in self.keys):
            sys.exit(f"chunk {name.hex()} is not what was stored")
        return content

    def page(self, name: bytes) -> bytes:
        if name == ZEROS:
            return bytes(1024 * NAME_BYTES)
        content, _ = self.frame(name, 1)
        if all(blake3(content, key=key.page_key).digest() != name for key in self.keys):
            sys.exit(f"page {name.hex()} is not what was stored")
        return content

    def manifest(self, path: Path) -> tuple[dict, dict]:
        shown, sealed, digest, _ = path.read_bytes().split(b"\n")
        if blake3(shown + b"\n" + sealed + b"\n").hexdigest().encode() != digest:
            sys.exit(f"{path.name} is damaged")
        secret = base64.b64decode(sealed)
        plain = self.opened(secret, shown)
        inside = json.loads(plain)
        inside["author"] = author(path.name, json.loads(shown)["id"], shown, plain, inside)
        return json.loads(shown), inside

    def write_disk(self, disk: dict, path: Path) -> None:
        names = b"".join(self.page(bytes.fromhex(page)) for page in disk["pages"])
        with path.open("xb") as file:
            file.truncate(disk["size_bytes"])
            for number in range(-(-disk["size_bytes"] // CHUNK_BYTES)):
                name = names[number * NAME_BYTES : (number + 1) * NAME_BYTES]
                if name != ZEROS:
                    file.seek(number * CHUNK_BYTES)
                    file.write(self.chunk(name))
            file.flush()
            os.fsync(file.fileno())


def main() -> None:
    if len(sys.argv) not in (2, 4):
        sys.exit(__doc__)
    text = os.environ.get("SYNVIRT_RECOVERY_KEY") or getpass.getpass("Recovery key: ")
    repository = Repository(Path(sys.argv[1]), master_key(text))
    if len(sys.argv) == 2:
        for path in sorted((repository.folder / "points").glob("*.point")):
            shown, inside = repository.manifest(path)
            print(shown["id"], shown["created_at"], inside["vm_name"], f"({inside['author']})")
        return
    point, folder = sys.argv[2], Path(sys.argv[3])
    shown, inside = repository.manifest(repository.folder / "points" / f"{point}.point")
    if shown["id"] != point:
        sys.exit(f"the manifest is that of {shown['id']}")
    print(f"{point}: {inside['author']}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "domain.xml").write_text(inside["domain_xml"])
    if inside["nvram"] is not None:
        (folder / "nvram.fd").write_bytes(base64.b64decode(inside["nvram"]))
    for number, (disk, named) in enumerate(zip(shown["disks"], inside["disks"], strict=True)):
        path = folder / f"{number}-{Path(named['target']).name}.raw"
        repository.write_disk(disk, path)
        print(f"{path}: {disk['size_bytes']} bytes")


if __name__ == "__main__":
    main()
