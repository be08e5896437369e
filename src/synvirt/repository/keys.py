"""A repository's key, and what is derived from it: names of chunks, and the frames that store them (docs/backup-format.md).

    master key, 32 bytes ─ BLAKE3 derive_key ─▶ names of chunks · names of pages · AES-256-GCM

A frame is nonce (12 bytes) ‖ ciphertext ‖ tag (16): AES-256-GCM (NIST SP 800-38D) of one byte for the packing of the rest (0
none, 1 zstd) and the rest; its associated data is the chunk's name. With random nonces one key is good for 2^32 chunks, 4 PiB
(section 8.3). Calls may come from any thread.
"""

import base64
import contextlib
import hashlib
import secrets
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import zstandard
from blake3 import blake3
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from synvirt.blocks import new_buffer
from synvirt.disks.packed import Damaged, zstd
from synvirt.errors import RepositoryDamaged, RepositoryKeyWrong
from synvirt.sizes import MIB

KEY_BYTES = 32
NAME_BYTES = 32
NONCE_BYTES = 12
TAG_BYTES = 16
CHUNK_BYTES = MIB
# A chunk, the byte before it, nonce and tag: a larger frame is not ours.
FRAME_BYTES_MAX = CHUNK_BYTES + 1 + NONCE_BYTES + TAG_BYTES
ZSTD_LEVEL = 1  # level 3 saves 6 % for twice the processor time on disks of guests
AS_IT_IS, ZSTD = b"\0", b"\1"

_CHECK = b"synvirt backup 1"


class Keys:
    """The keys that are derived from a master key of 32 bytes. Safe from many threads."""

    def __init__(self, master: bytes) -> None:
        self._chunk_key = _derived(master, "synvirt backup 1 chunk names")
        self._page_key = _derived(master, "synvirt backup 1 page names")
        self._gcm = AESGCM(_derived(master, "synvirt backup 1 encryption"))
        # A check of the key in the clear. It is derived, so it does not reveal the key.
        self.check = _derived(master, "synvirt backup 1 check").hex()
        self._local = threading.local()

    def chunk_name(self, content: bytes | bytearray | memoryview) -> bytes:
        return blake3(content, key=self._chunk_key).digest()

    def page_name(self, content: bytes) -> bytes:
        return blake3(content, key=self._page_key).digest()

    def frame(self, name: bytes, content: bytes | bytearray | memoryview) -> memoryview:
        """A chunk in its stored form: compressed if that is shorter, then sealed under its name. In memory of the thread, which
        its next call overwrites."""
        if not hasattr(self._local, "compressor"):
            self._local.compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_checksum=False)
            self._local.sealed = new_buffer(FRAME_BYTES_MAX)
        packed = self._local.compressor.compress(content)
        packing, packed = (ZSTD, packed) if len(packed) < len(content) else (AS_IT_IS, content)
        plain = self._plain(1 + len(packed))
        plain[:1], plain[1:] = packing, packed
        frame: memoryview = self._local.sealed[: NONCE_BYTES + len(plain) + TAG_BYTES]
        nonce = frame[:NONCE_BYTES] = secrets.token_bytes(NONCE_BYTES)
        self._gcm.encrypt_into(nonce, plain, name, frame[NONCE_BYTES:])
        return frame

    def content_into(self, name: bytes, frame: bytes, into: memoryview) -> None:
        """Fills `into`, which is as long as the chunk. RepositoryDamaged, where it is not what was stored under this name.

        Nothing of a chunk's size is allocated: new memory for each chunk would cost as much as opening it.
        """
        plain = self._opened(name, frame)
        filled = len(plain) - 1
        if plain[:1] == ZSTD:
            try:
                filled = zstd.decompress(plain[1:], into)
            except Damaged as error:
                raise RepositoryDamaged(f"chunk {name.hex()[:16]} cannot be unpacked: {error}") from error
        elif filled == len(into):
            into[:] = plain[1:]
        if filled != len(into) or self.chunk_name(into) != name:
            raise RepositoryDamaged(f"chunk {name.hex()[:16]} is not the one that was stored")

    def _opened(self, name: bytes, frame: bytes) -> memoryview:
        """The frame's content, in memory of the thread, which its next call overwrites. RepositoryDamaged."""
        sealed, plain = memoryview(frame), self._plain(max(len(frame) - NONCE_BYTES - TAG_BYTES, 0))
        try:
            self._gcm.decrypt_into(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], name, plain)
        except (InvalidTag, ValueError) as error:
            raise RepositoryDamaged(f"chunk {name.hex()[:16]} cannot be opened: its bytes have changed") from error
        return plain

    def _plain(self, length: int) -> memoryview:
        """Memory of the thread for a frame's content."""
        held: memoryview | None = getattr(self._local, "plain", None)
        if held is None or len(held) < length:
            held = self._local.plain = new_buffer(max(length, CHUNK_BYTES + 1))
        return held[:length]

    def seal(self, plain: bytes, *, belongs_to: bytes) -> bytes:
        """nonce ‖ ciphertext ‖ tag of AES-256-GCM; only the same `belongs_to` opens it."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        return nonce + self._gcm.encrypt(nonce, plain, belongs_to)

    def unseal(self, sealed: bytes, *, belongs_to: bytes, what: str) -> bytes:
        """The plain bytes. `what` names it in the error. RepositoryDamaged, where they were changed or have another key."""
        try:
            return self._gcm.decrypt(sealed[:NONCE_BYTES], memoryview(sealed)[NONCE_BYTES:], belongs_to)
        except (InvalidTag, ValueError) as error:
            raise RepositoryDamaged(f"{what} cannot be opened: its bytes have changed") from error


Opened = TypeVar("Opened")


class KeyRing:
    """The keys of a repository, newest first. The newest one writes; all of them open."""

    def __init__(self, masters: Sequence[bytes]) -> None:
        self.newest, *older = (Keys(master) for master in masters)
        self._all = (self.newest, *older)
        # Distinguishes names of one key from those of another; "" where there is only one key.
        self.epoch = self.newest.check if older else ""

    def chunk_name(self, content: bytes | bytearray | memoryview) -> bytes:
        return self.newest.chunk_name(content)

    def page_name(self, content: bytes) -> bytes:
        return self.newest.page_name(content)

    def frame(self, name: bytes, content: bytes | bytearray | memoryview) -> memoryview:
        """Like `Keys.frame`."""
        return self.newest.frame(name, content)

    def seal(self, plain: bytes, *, belongs_to: bytes) -> bytes:
        return self.newest.seal(plain, belongs_to=belongs_to)

    def is_page(self, name: bytes, content: bytes) -> bool:
        return any(keys.page_name(content) == name for keys in self._all)

    def content_into(self, name: bytes, frame: bytes, into: memoryview) -> None:
        """Like `Keys.content_into`."""
        self._first(lambda keys: keys.content_into(name, frame, into))

    def unseal(self, sealed: bytes, *, belongs_to: bytes, what: str) -> bytes:
        """Like `Keys.unseal`."""
        return self._first(lambda keys: keys.unseal(sealed, belongs_to=belongs_to, what=what))

    def _first(self, ask: Callable[[Keys], Opened]) -> Opened:
        for keys in self._all[:-1]:
            with contextlib.suppress(RepositoryDamaged):
                return ask(keys)
        return ask(self._all[-1])


def _derived(master: bytes, context: str) -> bytes:
    return blake3(master, derive_key_context=context).digest()


# ── the key, for people to write down ────────────────────────────────────────────────────────────────────────────────


def new_key() -> bytes:
    return secrets.token_bytes(KEY_BYTES)


def recovery_text(master: bytes) -> str:
    """Base32 in groups of four, with two bytes of SHA-256 behind the key, so that a copying mistake is found."""
    text = base64.b32encode(master + hashlib.sha256(_CHECK + master).digest()[:2]).decode().rstrip("=")
    return "-".join(text[at : at + 4] for at in range(0, len(text), 4))


def from_recovery_text(text: str) -> bytes:
    """RepositoryKeyWrong, where the text is no key."""
    letters = "".join(text.split()).replace("-", "").upper()
    try:
        found = base64.b32decode(letters + "=" * (-len(letters) % 8))
    except ValueError:
        found = b""
    master, check = found[:KEY_BYTES], found[KEY_BYTES:]
    if len(found) != KEY_BYTES + 2 or hashlib.sha256(_CHECK + master).digest()[:2] != check:
        raise RepositoryKeyWrong("this is not a recovery key", hint="it has 55 letters and digits, in groups of four")
    return master
