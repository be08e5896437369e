"""A folder that this host keeps for another SynVirt: what that one may do with it, and what not.

    put      a file is taken once, whole and checked: its hash needs no key. Nothing is replaced.
    delete   a restore point stays for the operator's number of days, whatever its owner asks; and so does all that it needs

The other host may be an attacker's, key and all. So nothing is believed that it says: times are of our own clock,
and what points need is found in themselves (peer_needs.py).
"""

import contextlib
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from blake3 import blake3

from synvirt.errors import BackupBadRequest, BackupConflict, BackupImmutable, RepositoryDamaged, SynvirtError
from synvirt.repository import manifest as manifests
from synvirt.repository import packs, repository
from synvirt.repository.folder import UNFINISHED, Entry, HostFolder
from synvirt.repository.peer_needs import Needs
from synvirt.sizes import KIB, MIB

DAY_S = 24 * 3600.0
# Of an answer: what a caller who does not read costs us.
PIECE_BYTES = MIB
# What we have begun and not ended: ours alone, so that what an earlier service left is swept.
_BEGUN = "peer-"
_HEX64 = "[0-9a-f]{64}"
_UUID = "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
# Of each kind of file: its name, and how large it may be.
_KINDS: dict[str, tuple[re.Pattern[str], int]] = {
    "header": (re.compile(repository.HEADER), 64 * KIB),
    "pack": (re.compile(rf"packs/{_HEX64}\.pack"), packs.PACK_BYTES),
    "point": (re.compile(rf"points/{_UUID}\.point"), manifests.MANIFEST_BYTES_MAX),
    "kept": (re.compile(rf"points/{_UUID}\.kept"), 0),
    # A line of 70 bytes for each pack of 64 MiB: those of 12 TiB.
    "condemned": (re.compile(rf"condemned/{_HEX64}"), 16 * MIB),
}
_PACK_LINES = re.compile(rf"({_HEX64}\.pack\n)+")


class Offer:
    """Safe from several threads; one of them for each folder. `keep_s`: how long a point stays at least."""

    def __init__(self, path: Path, *, keep_s: float, clock: Callable[[], float] = time.time, cache: Path | None = None) -> None:
        self._path, self.keep_s, self._clock, self._cache = path, keep_s, clock, cache
        self._lock = threading.RLock()
        self._needs: Needs | None = None
        self._swept = False

    def _folder(self) -> HostFolder:
        """RepositoryUnreachable, where it is away."""
        folder = HostFolder(self._path)
        with self._lock:
            if not self._swept and (self._path / UNFINISHED).is_dir():
                for entry in folder.entries(UNFINISHED):
                    if entry.name.startswith(_BEGUN):
                        folder.delete(f"{UNFINISHED}/{entry.name}")
                self._swept = True
        return folder

    # ── what is there ────────────────────────────────────────────────────────────────────────────────────────────────

    def room(self) -> tuple[int, int]:
        return self._folder().room()

    def make_folders(self) -> None:
        with self._lock:
            self._folder().make_folders(repository.FOLDERS)

    def entries(self, folder: str) -> list[Entry]:
        """Of one folder, or of all with the name «»; none of what is being written. BackupBadRequest, BackupNotFound."""
        if folder not in ("", *repository.FOLDERS):
            raise BackupBadRequest(f"a repository has no folder {folder[:64]!r}")
        return [] if folder == UNFINISHED else self._folder().entries(folder)

    def read(self, name: str, offset: int, length: int | None) -> tuple[int, Iterator[bytes]]:
        """How many bytes there will be, and these, a piece at a time: a caller who asks and does not read holds one piece of
        our memory, and not the whole of a pack. BackupBadRequest, RepositoryDamaged."""
        _, limit = _kind(name)
        if length is not None and length > limit:
            raise BackupBadRequest(f"{length} bytes of {name} were asked for, which has {limit} at most")
        folder = self._folder()
        size = folder.size(name)
        wanted = max(size - offset, 0) if length is None else length
        if offset + wanted > max(size, offset):
            folder.read(name, size, 1)  # says in its own words that the file ends there
        step = range(offset, offset + wanted, PIECE_BYTES)
        return wanted, (folder.read(name, at, min(PIECE_BYTES, offset + wanted - at)) for at in step)

    # ── taking ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def begin(self, name: str, length: int) -> "Receiving":
        """BackupBadRequest, where there can be no such file. RepositoryFull, before it comes."""
        _, limit = _kind(name)
        if not 0 <= length <= limit:
            raise BackupBadRequest(f"{name} has {length} bytes: {limit} are the most")
        return Receiving(self, self._folder(), name, length)

    def take(self, folder: HostFolder, unfinished: str, name: str, length: int, digest: str) -> None:
        """What was received whole and is durable gets its name. What is there already, and whole, stays."""
        _check(folder, unfinished, name, length, digest)
        with self._lock:
            there = _digest_of(folder, name)
            if there is None:
                folder.rename(unfinished, name)
                folder.sync_folder(name.rpartition("/")[0])
            elif there != digest:
                raise BackupConflict(f"{name} is there already, and is another", hint="nothing that is kept here is replaced")

    # ── keeping ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def delete(self, name: str) -> None:
        """Idempotent. BackupImmutable, while it is to be kept."""
        kind, _ = _kind(name)
        folder = self._folder()
        with self._lock:
            there = {entry.name: entry for entry in folder.entries(name.rpartition("/")[0])}
            entry = there.get(name.rpartition("/")[2])
            if entry is None:
                return
            if kind == "header":
                raise BackupImmutable("without its header a repository is none: it is not removed from here")
            if kind == "point":
                self._check_old(name, entry)
            if kind == "pack":
                self._needs = self._needs or Needs(folder, self._cache)
                self._needs.check_unneeded(entry.name)
            folder.delete(name)
            folder.sync_folder(name.rpartition("/")[0])

    def _check_old(self, name: str, entry: Entry) -> None:
        age_s = self._clock() - entry.modified_at
        if age_s < self.keep_s:
            raise BackupImmutable(
                f"{name} came {max(age_s, 0) / DAY_S:.1f} days ago, and is kept here for {self.keep_s / DAY_S:g}",
                hint="who runs this host decides how long points are kept at least: see its setting backup_offers",
            )


class Receiving:
    """One file on its way in: `feed` … `finish`, and `discard` whatever came of it. Its name counts from `finish` on."""

    def __init__(self, offer: Offer, folder: HostFolder, name: str, length: int) -> None:
        self._offer, self._folder, self._name, self._left = offer, folder, name, length
        self._length = length
        self._unfinished = f"{UNFINISHED}/{_BEGUN}{secrets.token_hex(8)}"
        self._digest = blake3()
        folder.write(self._unfinished, [])

    def feed(self, piece: bytes) -> None:
        self._left -= len(piece)
        if self._left < 0:
            raise BackupBadRequest(f"more came of {self._name} than the {self._length} bytes that were announced")
        self._digest.update(piece)
        self._folder.append(self._unfinished, piece)

    def finish(self) -> None:
        if self._left:
            raise BackupBadRequest(f"{self._left} of the {self._length} bytes of {self._name} did not come")
        self._folder.sync(self._unfinished)
        self._offer.take(self._folder, self._unfinished, self._name, self._length, self._digest.hexdigest())

    def discard(self) -> None:
        with contextlib.suppress(SynvirtError):
            self._folder.delete(self._unfinished)


def _digest_of(folder: HostFolder, name: str) -> str | None:
    """None, where there is no such file, or one that is damaged: what was checked may take its place."""
    try:
        content = folder.read(name)
        digest = blake3(content).hexdigest()
        _check(folder, name, name, len(content), digest)
    except (RepositoryDamaged, BackupBadRequest):
        return None
    return digest


def _check(folder: HostFolder, file: str, name: str, length: int, digest: str) -> None:
    """The bytes are those of a file of this name. BackupBadRequest."""
    kind, _ = _kind(name)
    inside = name.rpartition("/")[2]
    try:
        if kind == "pack":
            sound = inside == f"{digest}{packs.SUFFIX}"
            packs.read_tail(folder, inside, length, file=file)
        elif kind == "condemned":
            sound = inside == digest and _PACK_LINES.fullmatch(folder.read(file).decode("latin-1")) is not None
        elif kind == "point":
            manifests.shown_of(inside.removesuffix(manifests.SUFFIX), folder.read(file))
            sound = True
        else:
            sound = kind == "kept" or bool(repository.header_in(folder.read(file)))
    except (RepositoryDamaged, ValueError) as error:
        raise BackupBadRequest(f"what came for {name} is none: {error}") from error
    if not sound:
        raise BackupBadRequest(f"what came for {name} are not the bytes that the name was made of")


def _kind(name: str) -> tuple[str, int]:
    for kind, (pattern, limit) in _KINDS.items():
        if pattern.fullmatch(name):
            return kind, limit
    raise BackupBadRequest(f"a repository has no file {name[:120]!r}")
