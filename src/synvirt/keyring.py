"""The key that seals the credentials of sources, and the sealing (specification parts 1 and 5).

{data_dir}/keyring/migrator.key: 32 bytes, mode 0600, made once. A sealed secret is nonce (12 bytes) ‖ ciphertext ‖ tag (16) of
AES-256-GCM (NIST SP 800-38D). Its owner is bound in as associated data, so that it cannot be opened for another owner.
"""

import hmac
import os
import secrets
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from synvirt.durable import put_private_file, sweep, sync_folder
from synvirt.errors import Conflict, Internal, SynvirtError

KEY_BYTES = 32
KEY_MODE = 0o600
NONCE_BYTES = 12


# What is lost without a key, by its file.
_NEEDED_FOR = {
    "migrator.key": "without it the credentials of registered sources cannot be opened",
    "receipts.key": "it signs receipts and restore points, and a new one is a stranger to who checks them",
}


class KeyUnusable(SynvirtError):
    """The sealing key is not what it must be."""

    code, status = "E_MIG_INTERNAL", 500


class KeyReplaced(Conflict):
    """Another host of the fleet has put a new key in the place of this host's: what was sealed here now would be lost as soon
    as that one is copied here."""


def migrator_key(path: Path) -> bytes:
    """The key at `path`, made if there is none. KeyUnusable, if its size, mode or owner is wrong: then the service does not
    start."""
    sweep(path.parent, path.name)
    if not os.path.lexists(path):
        try:
            with suppress(FileExistsError):  # two make it at once: both use the first's
                put_private_file(path, secrets.token_bytes(KEY_BYTES), replace=False)
        except OSError as error:
            raise KeyUnusable(f"{path.name} cannot be made: {error.strerror}") from error
    return _read(path)


def _read(path: Path) -> bytes:
    try:
        # Not blocking: a pipe at its place would wait for a writer. A folder is opened too, and refused below.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise KeyUnusable(f"{path.name} cannot be opened: {error.strerror}") from error
    try:
        status = os.fstat(descriptor)
        _check(path, status)
        key = os.read(descriptor, KEY_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(key) != KEY_BYTES:
        raise KeyUnusable(
            f"{path.name} has {status.st_size} bytes, not {KEY_BYTES}",
            hint=f"restore it from your backup: {_NEEDED_FOR.get(path.name, 'what it seals cannot be opened without it')}",
        )
    return key


def _check(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise KeyUnusable(f"{path.name} is not a file", hint=f"move {path} elsewhere")
    mode = stat.S_IMODE(status.st_mode)
    if mode != KEY_MODE:
        raise KeyUnusable(
            f"{path.name} has mode {mode:04o}, not {KEY_MODE:04o}: others may have read it", hint=f"chmod 600 {path}"
        )
    # root may read a key of the service's user: in that user's folder, it can be no other's.
    owners = {os.geteuid(), path.parent.stat().st_uid} if os.geteuid() == 0 else {os.geteuid()}
    if status.st_uid not in owners:
        raise KeyUnusable(
            f"{path.name} belongs to user {status.st_uid}, not to the service's {os.geteuid()}",
            hint=f"if no other user could read it: chown {os.geteuid()} {path}",
        )


# Seals a secret again. It takes the bytes sealed with the present key and their owner, and gives those sealed with the next
# key.
Reseal = Callable[[bytes, bytes], bytes]
# Something that is sealed, and its owner; None: nothing is sealed.
Sample = Callable[[], tuple[bytes, bytes] | None]


class Replacement(NamedTuple):
    """A key was replaced by the key with the name `by`, on a host."""

    by: str
    host: str


class Keyring:
    """The key in use, and its replacement. Usable from any thread.

        key.new written ─▶ everything sealed again, in one transaction ─▶ key.new takes the key's place

    After a crash at any moment, one of the two files opens what is stored: `settle` finds out which, and keeps that one.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._next = path, path.with_name(f"{path.name}.new")
        sweep(path.parent, self._next.name)
        self._key = migrator_key(path)
        self._changing = threading.RLock()
        # What has replaced the key with this name, on any host of the fleet; None: nothing has. It asks the store.
        self.replacement: Callable[[str], Replacement | None] = lambda name: None
        # While a change is not settled: gives what `settle` needs.
        self._unsettled: Sample | None = None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Within the block, no other thread changes the key: what is sealed there is stored under the key that sealed it."""
        with self._changing:
            yield

    def seal(self, secret: bytes, *, belongs_to: bytes) -> bytes:
        """Seals a secret; it opens only with the same `belongs_to`. The key file is read again if it has changed.
        KeyReplaced."""
        with self._changing:
            self._settle_left()
            self._look()
            self._refuse_replaced()
            return seal(self._key, secret, belongs_to=belongs_to)

    def unseal(self, sealed: bytes, *, belongs_to: bytes) -> bytes:
        """The secret. If the present key does not open it, the file is read again, as another host's key may have been copied
        there. Internal, if that one does not open it either."""
        with self._changing:
            self._settle_left()
            with suppress(Internal):
                return unseal(self._key, sealed, belongs_to=belongs_to)
            self._look()
            return unseal(self._key, sealed, belongs_to=belongs_to)

    def opens(self, sealed: bytes, belongs_to: bytes) -> bool:
        """Whether the key opens it, or the next key of a change that a crash interrupted."""
        with self._changing:
            keys = [self._key, *([_read(self._next)] if self._next.exists() else [])]
        return any(opens(key, sealed, belongs_to) for key in keys)

    def _look(self) -> None:
        with suppress(KeyUnusable):  # missing, or only half copied: the key in memory still works
            self._key = _read(self._path)

    def _refuse_replaced(self) -> None:
        found = self.replacement(name_of(self._key))
        if found is not None:
            raise KeyReplaced(
                f"the sealing key of this host was replaced on host {found.host}, and nothing can be sealed with it any more",
                hint=f"copy keyring/migrator.key from host {found.host}, or from its backup, to this one; if that key is lost, "
                "move this host's away, start the service again, and give all credentials again",
            )

    def settle(self, sample: tuple[bytes, bytes] | None) -> None:
        """Finishes a change of keys that a crash interrupted. `sample`: something sealed, and its owner; None: nothing is
        sealed."""
        with self._changing:
            if not self._next.exists():
                return
            found = self.replacement(name_of(self._key))
            if found is not None and found.by == name_of(key := _read(self._next)):
                self._take_next(key)
            elif found is not None or sample is None or opens(self._key, *sample):
                self._next.unlink()
            elif opens(key := _read(self._next), *sample):
                self._take_next(key)
            else:
                raise KeyUnusable(
                    f"neither {self._path.name} nor {self._next.name} opens what is stored",
                    hint="restore the keyring folder from your backup, of the same day as the store",
                )

    def _settle_left(self) -> None:
        """Settles a change that failed. What would be sealed with the old key after a change to the next one would be lost with
        the old key."""
        if self._unsettled is not None:
            self.settle(self._unsettled())
            self._unsettled = None

    def rotate(self, store: Callable[[Reseal, str, str], int], sample: Sample) -> int:
        """Changes the key. `store` replaces everything that is sealed, and notes that the key with the first name was replaced
        by that with the second, all or nothing; it returns how much was sealed. KeyReplaced."""
        with self._changing:
            self.settle(sample())
            self._look()
            self._refuse_replaced()
            key = migrator_key(self._next)
            sync_folder(self._next.parent)

            def reseal(sealed: bytes, belongs_to: bytes) -> bytes:
                return seal(key, unseal(self._key, sealed, belongs_to=belongs_to), belongs_to=belongs_to)

            self._unsettled = sample
            try:
                count = store(reseal, name_of(self._key), name_of(key))
                self._take_next(key)
            except Exception:  # the transaction may have been committed although its answer was lost
                self._settle_left()
                self._refuse_replaced()  # another host was faster
                raise
            self._unsettled = None
            return count

    def _take_next(self, key: bytes) -> None:
        self._next.replace(self._path)
        sync_folder(self._path.parent)
        self._key = key


def name_of(key: bytes) -> str:
    """By which hosts know a key, without knowing the key."""
    return hmac.digest(key, b"the name of a sealing key", "sha256")[:16].hex()


def opens(key: bytes, sealed: bytes, belongs_to: bytes) -> bool:
    """Whether this key has sealed it, for this owner."""
    try:
        unseal(key, sealed, belongs_to=belongs_to)
    except Internal:
        return False
    return True


def seal(key: bytes, secret: bytes, *, belongs_to: bytes) -> bytes:
    """nonce ‖ ciphertext ‖ tag of AES-256-GCM; it opens only with the same key and `belongs_to`."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    return nonce + AESGCM(key).encrypt(nonce, secret, belongs_to)


def unseal(key: bytes, sealed: bytes, *, belongs_to: bytes) -> bytes:
    """The secret. Internal, if the key, the owner or the bytes are not those of the sealing."""
    try:
        return AESGCM(key).decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], belongs_to)
    except (InvalidTag, ValueError) as error:
        raise Internal("a sealed secret cannot be opened: its key or its bytes have changed") from error
