"""A sealed copy of a repository's key, as one line of text: it is of no use to a finder.

    synvirt-key-1:scrypt:N:r:p:SALT:SEALED      the passphrase opens it (RFC 7914, then AES-256-GCM)
    synvirt-key-1:systemd:SEALED                only this host opens it, by systemd-creds: its own key, or its TPM

Base64. The part before the last colon is associated data. docs/backup-format.md.
"""

import base64
import binascii
import hashlib
import secrets
import tempfile
from pathlib import Path
from typing import Literal

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from synvirt import programs
from synvirt.errors import BackupBadRequest, RepositoryKeyWrong
from synvirt.programs import ProgramFailed
from synvirt.repository.keys import KEY_BYTES, NONCE_BYTES

PREFIX = "synvirt-key-1:"
# 128 MiB and about half a second per guess, as a stolen copy can be guessed at on other computers (OWASP's advice for stored
# secrets).
SCRYPT_N, SCRYPT_R, SCRYPT_P = 1 << 17, 8, 1
SCRYPT_BYTES_MAX, SCRYPT_P_MAX = 256 << 20, 4
PASSPHRASE_CHARS_MIN = 12
# A TPM may take seconds.
TIMEOUT_S = 60.0
_NAME = "synvirt-backup-key"

Bound = Literal["host", "tpm2"]


def by_passphrase(master: bytes, passphrase: str) -> str:
    """BackupBadRequest, where the passphrase is too easy to guess."""
    if len(passphrase) < PASSPHRASE_CHARS_MIN:
        raise BackupBadRequest(f"a passphrase has {PASSPHRASE_CHARS_MIN} characters at least: five words, for example")
    salt, nonce = secrets.token_bytes(16), secrets.token_bytes(NONCE_BYTES)
    head = f"{PREFIX}scrypt:{SCRYPT_N}:{SCRYPT_R}:{SCRYPT_P}:{base64.b64encode(salt).decode()}"
    key = _stretched(passphrase, salt, SCRYPT_N, SCRYPT_R, SCRYPT_P)
    return f"{head}:{base64.b64encode(nonce + AESGCM(key).encrypt(nonce, master, head.encode())).decode()}"


def by_this_host(master: bytes, bound: Bound) -> str:
    """BackupBadRequest, where this host does not have these means."""
    return f"{PREFIX}systemd:{base64.b64encode(_systemd('encrypt', master, f'--with-key={bound}')).decode()}"


def is_sealed(text: str) -> bool:
    return text.strip().startswith(PREFIX)


def opened(text: str, passphrase: str) -> bytes:
    """The key. RepositoryKeyWrong, BackupBadRequest."""
    head, _, last = text.strip().rpartition(":")
    try:
        sealed = base64.b64decode(last, validate=True)
        way, *numbers = head.removeprefix(PREFIX).split(":")
        if way == "systemd" and not numbers:
            master = _systemd("decrypt", sealed)
        elif way == "scrypt" and len(numbers) == 4:
            n, r, p = (int(number) for number in numbers[:3])
            key = _stretched(passphrase, base64.b64decode(numbers[3], validate=True), n, r, p)
            master = AESGCM(key).decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], head.encode())
        else:
            master = b""
    except InvalidTag as error:
        raise RepositoryKeyWrong("this passphrase does not open that copy of a key") from error
    except (ValueError, binascii.Error) as error:
        raise RepositoryKeyWrong("this is not a sealed copy of a key") from error
    if len(master) != KEY_BYTES:
        raise RepositoryKeyWrong("this is not a sealed copy of a key")
    return master


def _stretched(passphrase: str, salt: bytes, n: int, r: int, p: int) -> bytes:
    """ValueError, for numbers that our copies never have, as they cost the opener time and memory."""
    if n < 2 or n & (n - 1) or r < 1 or 128 * n * r > SCRYPT_BYTES_MAX or not 0 < p <= SCRYPT_P_MAX:
        raise ValueError("it asks for too much")
    return hashlib.scrypt(passphrase.encode(), salt=salt, n=n, r=r, p=p, maxmem=2 * SCRYPT_BYTES_MAX, dklen=KEY_BYTES)


def _systemd(what: str, content: bytes, *options: str) -> bytes:
    with tempfile.TemporaryDirectory(prefix="synvirt-key-", dir=_in_memory()) as folder:  # its mode is 0700
        given, made = Path(folder) / "in", Path(folder) / "out"
        given.write_bytes(content)
        argv = ["systemd-creds", what, *options, f"--name={_NAME}", str(given), str(made)]
        try:
            programs.run(argv, timeout_s=TIMEOUT_S, missing=BackupBadRequest)
        except ProgramFailed as error:
            why = (error.stderr.splitlines() or ["it printed no message"])[-1]
            raise BackupBadRequest(
                f"systemd-creds cannot {what} it here: {why}"[:300],
                hint="has this host a TPM 2.0, and systemd 250 or later? A copy by a passphrase needs neither",
            ) from error
        return made.read_bytes()


def _in_memory() -> str | None:
    """A folder in memory: nothing in it is on a disk."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None  # noqa: S108 - a folder of ours below it, made with mode 0700
