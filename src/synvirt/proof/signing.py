"""Signatures by a host's Ed25519 key, in two forms that other tools read: SSHSIG (`ssh-keygen -Y verify`) and DSSE (in-toto's).

SSHSIG: OpenSSH's PROTOCOL.sshsig. DSSE: github.com/secure-systems-lab/dsse, protocol.md, version 1.0.2. Keys as OpenSSH writes
them: RFC 8709. Ed25519 signatures of the same message are always equal (RFC 8032), but nothing here depends on it.
"""

import base64
import binascii
import hashlib
import json
import re
import struct
from pathlib import Path
from typing import Any, Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from synvirt.errors import MalformedArchive
from synvirt.keyring import migrator_key

NAMESPACE: Final = "synvirt-receipt"
# Of restore points: a signature for one purpose is not valid for the other.
BACKUPS: Final = "synvirt-backup"
PAYLOAD_TYPE: Final = "application/vnd.in-toto+json"
_KEY_TYPE: Final = b"ssh-ed25519"
_MAGIC: Final = b"SSHSIG"
_HASH: Final = b"sha512"
_BEGIN, _END = "-----BEGIN SSH SIGNATURE-----", "-----END SSH SIGNATURE-----"
_SIGNER = re.compile(r'(\S+) (?:namespaces="[^"]*" )?ssh-ed25519 (\S+)')


class HostKey:
    """The key that signs this host's receipts, made once: 32 bytes at `path`, mode 0600."""

    def __init__(self, path: Path, host: str) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(migrator_key(path))
        self.host = host
        self.public = PublicKey(self._key.public_key())

    @property
    def identity(self) -> str:
        """This host's name for `ssh-keygen -Y verify -I`."""
        return f"synvirt@{self.host}"

    @property
    def allowed_signers(self) -> str:
        """A line of the file that `ssh-keygen -Y verify -f` takes (ssh-keygen(1), «ALLOWED SIGNERS»)."""
        return f'{self.identity} namespaces="{NAMESPACE},{BACKUPS}" {self.public.line}\n'

    def sshsig(self, message: bytes, namespace: str = NAMESPACE) -> str:
        """The signature of a message as an armoured SSHSIG."""
        signature = _string(_KEY_TYPE) + _string(self._key.sign(_to_sign(message, namespace)))
        parts = (self.public.blob, namespace.encode(), b"", _HASH, signature)
        text = base64.b64encode(_MAGIC + struct.pack(">I", 1) + b"".join(map(_string, parts))).decode()
        return "\n".join([_BEGIN, *(text[at : at + 70] for at in range(0, len(text), 70)), _END, ""])

    def dsse(self, message: bytes) -> str:
        """The message and its signature as a DSSE envelope (JSON)."""
        signature = base64.b64encode(self._key.sign(_pae(message))).decode()
        envelope = {
            "payload": base64.b64encode(message).decode(),
            "payloadType": PAYLOAD_TYPE,
            "signatures": [{"keyid": self.public.fingerprint, "sig": signature}],
        }
        return json.dumps(envelope, indent=1) + "\n"


class PublicKey:
    """An Ed25519 public key, as OpenSSH writes it."""

    def __init__(self, key: Ed25519PublicKey) -> None:
        self._key = key
        self.blob = _string(_KEY_TYPE) + _string(key.public_bytes(Encoding.Raw, PublicFormat.Raw))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PublicKey) and self.blob == other.blob

    def __hash__(self) -> int:
        return hash(self.blob)

    @property
    def line(self) -> str:
        return f"{_KEY_TYPE.decode()} {base64.b64encode(self.blob).decode()}"

    @property
    def fingerprint(self) -> str:
        """The fingerprint in the form of `ssh-keygen -l`."""
        return "SHA256:" + base64.b64encode(hashlib.sha256(self.blob).digest()).decode().rstrip("=")

    @classmethod
    def from_signers(cls, text: str, name: str = "allowed_signers") -> "PublicKey":
        """The key in a file of allowed signers with one line, or in a public key file. MalformedArchive."""
        lines = text.strip().splitlines()
        line = lines[0] if len(lines) == 1 else ""
        found = _SIGNER.fullmatch(line)
        encoded = found[2] if found else line.split(" ")[1] if line.startswith("ssh-ed25519 ") else ""
        try:
            blob = base64.b64decode(encoded, validate=True)
            kind, raw = _strings(blob, 2)
            if kind == _KEY_TYPE:
                return cls(Ed25519PublicKey.from_public_bytes(raw))
        except (ValueError, binascii.Error):
            pass
        raise MalformedArchive(f"{name} has no Ed25519 key of OpenSSH's in one line")

    def check_sshsig(self, message: bytes, armored: str, name: str, namespace: str = NAMESPACE) -> None:
        """MalformedArchive, if this is not the key's signature of the message."""
        lines = armored.strip().splitlines()
        begins = _MAGIC + struct.pack(">I", 1)
        try:
            raw = base64.b64decode("".join(lines[1:-1]), validate=True)
            blob, purpose, _, algorithm, signature = _strings(raw[len(begins) :], 5)
            kind, value = _strings(signature, 2)
        except (ValueError, binascii.Error):
            lines = []
        if len(lines) < 2 or (lines[0], lines[-1]) != (_BEGIN, _END) or not raw.startswith(begins):
            raise MalformedArchive(f"{name} is not an SSH signature")
        if (purpose, algorithm, kind) != (namespace.encode(), _HASH, _KEY_TYPE) or blob != self.blob:
            raise MalformedArchive(f"{name} is not by the key {self.fingerprint}")
        self._check(value, _to_sign(message, namespace), name)

    def check_dsse(self, message: bytes, envelope: str, name: str) -> None:
        """MalformedArchive, if the envelope does not hold the message, or this key has not signed it."""
        try:
            value: Any = json.loads(envelope)
            payload = base64.b64decode(value["payload"], validate=True)
            (signature,) = (base64.b64decode(one["sig"], validate=True) for one in value["signatures"])
            is_ours = value["payloadType"] == PAYLOAD_TYPE and value["signatures"][0]["keyid"] == self.fingerprint
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            raise MalformedArchive(f"{name} is not a DSSE envelope with one signature") from None
        if payload != message:
            raise MalformedArchive(f"{name} holds another statement than data/statement.json")
        if not is_ours:
            raise MalformedArchive(f"{name} is not by the key {self.fingerprint}")
        self._check(signature, _pae(message), name)

    def _check(self, signature: bytes, signed: bytes, name: str) -> None:
        try:
            self._key.verify(signature, signed)
        except InvalidSignature:
            raise MalformedArchive(f"{name}: the signature is wrong") from None


def _to_sign(message: bytes, namespace: str) -> bytes:
    parts = (namespace.encode(), b"", _HASH, hashlib.sha512(message).digest())
    return _MAGIC + b"".join(map(_string, parts))


def _pae(message: bytes) -> bytes:
    return b"DSSEv1 %d %s %d %s" % (len(PAYLOAD_TYPE), PAYLOAD_TYPE.encode(), len(message), message)


def _string(value: bytes) -> bytes:
    return struct.pack(">I", len(value)) + value


def _strings(raw: bytes, count: int) -> list[bytes]:
    """The strings. ValueError, if there are not exactly this many."""
    found, at = [], 0
    for _ in range(count):
        if at + 4 > len(raw):
            raise ValueError
        (length,) = struct.unpack_from(">I", raw, at)
        if at + 4 + length > len(raw):
            raise ValueError
        found.append(raw[at + 4 : at + 4 + length])
        at += 4 + length
    if at != len(raw):
        raise ValueError
    return found
