"""A folder that this host keeps for another SynVirt, and the limits on what that one may do with it.

    put      a file is taken once, whole and checked: its hash needs no key. Nothing is replaced.
    delete   a restore point stays for the operator's number of days, whatever its owner asks; and so does all that it needs.
             A protected one stays until the operator of this host releases it (`release`)

The other host may belong to an attacker, with its key. So nothing that it says is believed: times are of our own clock, and
what points need is found in the points themselves (peer_needs.py).
"""

import contextlib
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import UUID

from blake3 import blake3

from synvirt.errors import (
    BackupBadRequest,
    BackupConflict,
    BackupImmutable,
    BackupNotFound,
    RepositoryDamaged,
    RepositoryFull,
    SynvirtError,
)
from synvirt.repository import condemned, key_change, packs, repository
from synvirt.repository import manifest as manifests
from synvirt.repository.folder import UNFINISHED, Entry, HostFolder
from synvirt.sizes import KIB, MIB

if TYPE_CHECKING:
    from synvirt.repository.peer_needs import Needs

DAY_S = 24 * 3600.0
# Pieces of an answer: what a caller costs us who asks and does not read.
PIECE_BYTES = MIB
# The prefix of our unfinished files, so that the leftovers of an earlier service are removed.
_BEGUN = "peer-"
_HEX64 = "[0-9a-f]{64}"
_UUID = "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
# For each kind of file: its name, and its largest size.
_KINDS: dict[str, tuple[re.Pattern[str], int]] = {
    "header": (re.compile(repository.HEADER), repository.HEADER_BYTES_MAX),
    "pack": (re.compile(rf"packs/{_HEX64}\.pack"), packs.PACK_BYTES),
    "point": (re.compile(rf"points/{_UUID}\.point"), manifests.MANIFEST_BYTES_MAX),
    "kept": (re.compile(rf"points/{_UUID}\.kept"), 0),
    "key": (re.compile(rf"{key_change.FOLDER}/{_HEX64}"), key_change.CHANGE_BYTES_MAX),
    "condemned": (re.compile(rf"condemned/{_HEX64}"), condemned.BYTES_MAX),
}
# The least that a file costs, in blocks and names: a quota must also limit a million empty files.
FILE_BYTES_MIN = 4 * KIB
# The part of a quota for lists of condemned packs: else a full folder could never be emptied.
CONDEMNED_BYTES = 32 * MIB
_PACK_LINES = re.compile(rf"({_HEX64}\.pack\n)+")


@dataclass(frozen=True, slots=True)
class Held:
    """The content of the folder, by this host's own files: point ids from their names."""

    used_bytes: int
    points: tuple[str, ...]
    protected: tuple[str, ...]


class Offer:
    """Safe from several threads; one for each folder. `keep_s`: the shortest time that a point stays. `quota_bytes`: the limit,
    with files that are being received. `reading`: parses the other host's manifests."""

    def __init__(
        self,
        path: Path,
        *,
        keep_s: float,
        clock: Callable[[], float] = time.time,
        cache: Path | None = None,
        quota_bytes: int | None = None,
        reading: manifests.Reading = manifests.HERE,
    ) -> None:
        self._path, self.keep_s, self._clock, self._cache = path, keep_s, clock, cache
        self.quota_bytes, self._reading = quota_bytes, reading
        self._lock = threading.RLock()
        self._used: int | None = None
        self._coming = 0
        self._needs: Needs | None = None
        self._swept = False

    def _folder(self) -> HostFolder:
        """RepositoryUnreachable, where it is missing."""
        folder = HostFolder(self._path)
        with self._lock:
            if not self._swept and (self._path / UNFINISHED).is_dir():
                for entry in folder.entries(UNFINISHED):
                    if entry.name.startswith(_BEGUN):
                        folder.delete(f"{UNFINISHED}/{entry.name}")
                self._swept = True
        return folder

    # ── content ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def room(self) -> tuple[int, int]:
        """The limit in bytes, and how much is used: of the quota, or of the file system where that is less."""
        folder = self._folder()
        capacity, used = folder.room()
        if self.quota_bytes is None:
            return capacity, used
        with self._lock:
            ours = self._counted(folder)
        return min(self.quota_bytes, ours + max(capacity - used, 0)), ours

    def held(self) -> Held:
        """The size of the folder, and the ids of its points and of the protected ones."""
        folder = self._folder()
        names = [entry.name for entry in folder.entries(manifests.FOLDER)] if (self._path / manifests.FOLDER).is_dir() else []
        points, kept = (
            tuple(name.removesuffix(suffix) for name in names if name.endswith(suffix))
            for suffix in (manifests.SUFFIX, repository.KEPT_SUFFIX)
        )
        with self._lock:
            return Held(self._count(folder), points, kept)

    def make_folders(self) -> None:
        """Makes missing folders of a repository."""
        with self._lock:
            self._folder().make_folders(repository.FOLDERS)

    def entries(self, folder: str) -> list[Entry]:
        """The entries of one folder, or with the name «» of all; without files that are being received. BackupBadRequest,
        BackupNotFound."""
        if folder not in ("", *repository.FOLDERS):
            raise BackupBadRequest(f"a repository has no folder {folder[:64]!r}")
        return [] if folder == UNFINISHED else self._folder().entries(folder)

    def read(self, name: str, offset: int, length: int | None) -> tuple[int, Iterator[bytes]]:
        """The number of bytes, and the bytes piece by piece: a caller who asks and does not read holds one piece of our memory,
        not a whole pack. BackupBadRequest, RepositoryDamaged."""
        _, limit = _kind(name)
        if length is not None and length > limit:
            raise BackupBadRequest(f"{length} bytes of {name} were asked for, which has {limit} at most")
        folder = self._folder()
        size = folder.size(name)
        wanted = max(size - offset, 0) if length is None else length
        if offset + wanted > max(size, offset):
            folder.read(name, size, 1)  # raises the error of a file that ends there
        step = range(offset, offset + wanted, PIECE_BYTES)
        return wanted, (folder.read(name, at, min(PIECE_BYTES, offset + wanted - at)) for at in step)

    # ── receiving ────────────────────────────────────────────────────────────────────────────────────────────────────

    def begin(self, name: str, length: int) -> "Receiving":
        """BackupBadRequest, where no such file is allowed. RepositoryFull, before any bytes come."""
        _, limit = _kind(name)
        if not 0 <= length <= limit:
            raise BackupBadRequest(f"{name} has {length} bytes: {limit} are the most")
        folder = self._folder()
        cost = self._reserved(folder, name, length)
        try:
            return Receiving(self, folder, name, length, cost)
        except BaseException:
            self.let_go(cost)
            raise

    def _reserved(self, folder: HostFolder, name: str, length: int) -> int:
        """The space that the file will take. RepositoryFull, where the quota has no room beside present and expected files."""
        cost = max(length, FILE_BYTES_MIN)
        with self._lock:
            quota = self.quota_bytes
            if quota is not None and _kind(name)[0] != "condemned":
                quota -= min(quota // 16, CONDEMNED_BYTES)
            if quota is not None and self._counted(folder) + self._coming + cost > quota:
                free = quota - self._count(folder) - self._coming  # somebody may have deleted files by hand
                if cost > free:
                    raise RepositoryFull(
                        f"{name} has {length} bytes, and {max(free, 0)} of the quota of {self.quota_bytes} are free",
                        hint="let retention remove points and collect the garbage, or ask who runs that host for more room",
                    )
            self._coming += cost
        return cost

    def let_go(self, cost: int) -> None:
        """Frees the reservation: the file has come, or will not come."""
        with self._lock:
            self._coming -= cost

    def _counted(self, folder: HostFolder) -> int:
        return self._count(folder) if self._used is None else self._used

    def _count(self, folder: HostFolder) -> int:
        sizes = [max(entry.size_bytes, FILE_BYTES_MIN) for entry in folder.entries("") if entry.name == repository.HEADER]
        for name in repository.FOLDERS:
            if name != UNFINISHED and (self._path / name).is_dir():
                sizes += [max(entry.size_bytes, FILE_BYTES_MIN) for entry in folder.entries(name)]
        self._used = sum(sizes)
        return self._used

    def take(self, folder: HostFolder, unfinished: str, name: str, length: int, digest: str) -> None:
        """Gives a file that was received whole and is durable its name. A whole file of that name stays."""
        _check(folder, unfinished, name, length, digest, reading=self._reading)
        with self._lock:
            there = _digest_of(folder, name, self._reading)
            if there is None and _kind(name)[0] == "key" and len(folder.entries(key_change.FOLDER)) >= key_change.CHANGES_MAX:
                raise BackupConflict(f"the key of a repository changes {key_change.CHANGES_MAX} times at most")
            if there is None:
                folder.rename(unfinished, name)
                folder.sync_folder(name.rpartition("/")[0])
                if self._used is not None:
                    self._used += max(length, FILE_BYTES_MIN)
            elif there != digest:
                raise BackupConflict(f"{name} already exists with other content", hint="nothing that is kept here is replaced")

    # ── keeping ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def delete(self, name: str) -> None:
        """Idempotent. BackupImmutable, while it must be kept."""
        kind, _ = _kind(name)
        folder = self._folder()
        with self._lock:
            there = {entry.name: entry for entry in folder.entries(name.rpartition("/")[0])}
            entry = there.get(name.rpartition("/")[2])
            if entry is None:
                return
            if kind in ("header", "key"):
                raise BackupImmutable(f"without its {kind} a repository cannot be opened: it is not removed from here")
            if kind == "kept":
                raise BackupImmutable(
                    f"the protection of {entry.name.removesuffix(repository.KEPT_SUFFIX)} is not taken off from here",
                    hint="who runs that host can: synvirt backup release-point OFFER POINT there",
                )
            if kind == "point":
                self._check_old(name, entry)
                if name.removesuffix(manifests.SUFFIX).rpartition("/")[2] + repository.KEPT_SUFFIX in there:
                    raise BackupImmutable(f"{name} is protected", hint="only who runs that host can take that off")
            if kind == "pack":
                from synvirt.repository.peer_needs import Needs

                self._needs = self._needs or Needs(folder, self._cache, reading=self._reading)
                self._needs.check_unneeded(entry.name)
            self._delete(folder, name, entry)

    def _delete(self, folder: HostFolder, name: str, entry: Entry) -> None:
        folder.delete(name)
        folder.sync_folder(name.rpartition("/")[0])
        if self._used is not None:
            self._used -= max(entry.size_bytes, FILE_BYTES_MIN)

    def release(self, point_id: UUID) -> None:
        """The operator of this host ends its protection. BackupNotFound."""
        folder, name = self._folder(), f"{point_id}{repository.KEPT_SUFFIX}"
        with self._lock:
            entry = next((one for one in folder.entries(manifests.FOLDER) if one.name == name), None)
            if entry is None:
                raise BackupNotFound(f"no restore point {point_id} is protected here")
            self._delete(folder, f"{manifests.FOLDER}/{name}", entry)

    def _check_old(self, name: str, entry: Entry) -> None:
        age_s = self._clock() - entry.modified_at
        if age_s < self.keep_s:
            raise BackupImmutable(
                f"{name} came {max(age_s, 0) / DAY_S:.1f} days ago, and is kept here for {self.keep_s / DAY_S:g}",
                hint="who runs this host decides how long points are kept at least: see its setting backup_offers",
            )


class Receiving:
    """One file that is being received: `feed` … `finish`, and in any case `discard`. Its name is valid from `finish` on."""

    def __init__(self, offer: Offer, folder: HostFolder, name: str, length: int, cost: int) -> None:
        self._offer, self._folder, self._name, self._left, self._cost = offer, folder, name, length, cost
        self._length = length
        self._unfinished = f"{UNFINISHED}/{_BEGUN}{secrets.token_hex(8)}"
        self._digest = blake3()
        folder.write(self._unfinished, [])

    def feed(self, piece: bytes) -> None:
        """Takes the next bytes of the file. BackupBadRequest, where they are more than announced."""
        self._left -= len(piece)
        if self._left < 0:
            raise BackupBadRequest(f"more bytes of {self._name} arrived than the {self._length} bytes that were announced")
        self._digest.update(piece)
        self._folder.append(self._unfinished, piece)

    def finish(self) -> None:
        """Makes the file durable under its name. BackupBadRequest, where bytes are missing, or their hash is not that of the
        name."""
        if self._left:
            raise BackupBadRequest(f"{self._left} of the {self._length} bytes of {self._name} did not come")
        self._folder.sync(self._unfinished)
        self._offer.take(self._folder, self._unfinished, self._name, self._length, self._digest.hexdigest())

    def discard(self) -> None:
        """Call it once, at the end."""
        self._offer.let_go(self._cost)
        with contextlib.suppress(SynvirtError):
            self._folder.delete(self._unfinished)


def _digest_of(folder: HostFolder, name: str, reading: manifests.Reading) -> str | None:
    """None, where there is no such file, or a damaged one: a checked file may replace it."""
    try:
        content = folder.read(name)
        digest = blake3(content).hexdigest()
        _check(folder, name, name, len(content), digest, reading=reading)
    except (RepositoryDamaged, BackupBadRequest):
        return None
    return digest


def _check(folder: HostFolder, file: str, name: str, length: int, digest: str, *, reading: manifests.Reading) -> None:
    """Checks that the bytes are those of a file of this name. BackupBadRequest."""
    kind, _ = _kind(name)
    inside = name.rpartition("/")[2]
    try:
        if kind == "pack":
            sound = inside == f"{digest}{packs.SUFFIX}"
            packs.read_tail(folder, inside, length, file=file)
        elif kind == "condemned":
            sound = inside == digest and _PACK_LINES.fullmatch(folder.read(file).decode("latin-1")) is not None
        elif kind == "key":
            sound = key_change.parsed(inside, folder.read(file)).check == inside
        elif kind == "point":
            unread = manifests.unread(inside.removesuffix(manifests.SUFFIX), folder.read(file))
            manifests.sound(reading.shown([unread])[0])
            sound = True
        else:
            sound = kind == "kept" or bool(repository.header_in(folder.read(file)))
    except (RepositoryDamaged, ValueError, RecursionError) as error:
        raise BackupBadRequest(f"what came for {name} is none: {error}") from error
    if not sound:
        raise BackupBadRequest(f"what came for {name} are not the bytes that the name was made of")


def _kind(name: str) -> tuple[str, int]:
    for kind, (pattern, limit) in _KINDS.items():
        if pattern.fullmatch(name):
            return kind, limit
    raise BackupBadRequest(f"a repository has no file {name[:120]!r}")
