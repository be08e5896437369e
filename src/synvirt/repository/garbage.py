"""Removes what nothing needs any more, in two steps a day apart, so that no run loses what it relies on.

    collect:   every manifest, every page, every footer ─▶ what is needed
                 not needed, and old        ─▶ a list of condemned packs
                 condemned a day ago, and still not needed ─▶ deleted
                 half of a pack not needed  ─▶ the needed half goes into a new pack; the old one is condemned

Frames are moved unchanged, so collecting needs no key. If anything cannot be read, nothing is removed, as it is not known what
a damaged manifest needs. Several hosts may collect at once, while runs go on: of several packs with one chunk, all of them keep
the same one (`Repository.places`). A run is refused if something that it relies on is condemned before it has committed. What
is condemned after that is checked again before it is deleted.

After a collection was killed, the next one decides everything again, as a backup may now need what was about to be removed.
What was moved, condemned or deleted by then counts as done.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from blake3 import blake3

from synvirt.copying import Bucket, Copied
from synvirt.errors import Cancelled, RepositoryDamaged
from synvirt.model.values import Bytes, Model
from synvirt.repository import condemned, packs
from synvirt.repository.folder import UNFINISHED, Folder, put
from synvirt.repository.manifest import NONE, PAGE_BYTES, names_in
from synvirt.repository.repository import Repository
from synvirt.sizes import counted

GRACE_S = 24 * 3600
# Nothing needs yet what an unfinished run has written. This is longer than any run takes.
YOUNG_S = 7 * 24 * 3600
# New packs, 64 MiB each, that are filled before the old ones are condemned: after a kill, a collection moves at most this much
# again. Each list of condemned packs is a file that every run reads.
MOVED_AT_ONCE = 16
# Deleted and condemned packs in one part of a sweep: half a MiB of names, which is stored before the part is done.
SWEPT_AT_ONCE = 2048
# Packs in one list: 7 MiB. A list of over condemned.BYTES_MAX is not read.
CONDEMNED_AT_ONCE = 100_000


class Collected(Model):
    """What a collection did, or would do (dry run)."""

    packs_deleted: int = 0
    bytes_deleted: Bytes = 0
    packs_condemned: int = 0
    bytes_condemned: Bytes = 0
    bytes_moved: Bytes = 0


class Sweep(Model):
    """What a collection will take out of use: bytes by the pack's name. `moved`: what is needed of some condemned packs.
    `done`: what it has already done."""

    done: Collected = Collected()
    deleted: dict[str, Bytes]
    condemned: dict[str, Bytes]
    moved: dict[str, Bytes]

    def parts(self) -> Iterator["Sweep"]:
        """The sweep in parts of SWEPT_AT_ONCE packs, at least one. Each part must be done before the next."""
        done = self.done
        for at in range(0, max(len(self.deleted), len(self.condemned), 1), SWEPT_AT_ONCE):
            deleted, condemned = (
                dict(islice(swept.items(), at, at + SWEPT_AT_ONCE)) for swept in (self.deleted, self.condemned)
            )
            moved = {name: self.moved[name] for name in condemned if name in self.moved}
            yield (part := Sweep(done=done, deleted=deleted, condemned=condemned, moved=moved))
            done = part.collected()

    def cut_off(self, there: set[str], condemned: set[str]) -> Collected:
        """What was done of the sweep, and before it, when it was killed. `there`, `condemned`: the present packs."""
        return Sweep(
            done=self.done,
            deleted=_those(self.deleted, lambda name: name not in there),
            condemned=_those(self.condemned, lambda name: name in condemned),
            moved=_those(self.moved, lambda name: name in condemned),
        ).collected()

    def collected(self) -> Collected:
        """What is done after the sweep, with what was done before it."""
        return Collected(
            packs_deleted=self.done.packs_deleted + len(self.deleted),
            bytes_deleted=self.done.bytes_deleted + sum(self.deleted.values()),
            packs_condemned=self.done.packs_condemned + len(self.condemned),
            bytes_condemned=self.done.bytes_condemned + sum(self.condemned.values()),
            bytes_moved=self.done.bytes_moved + sum(self.moved.values()),
        )


def _those(planned: dict[str, int], are: Callable[[str], bool]) -> dict[str, int]:
    return {name: count for name, count in planned.items() if are(name)}


@dataclass(frozen=True)
class _Seen:
    """One look at the whole repository. `live`: for each needed pack, the needed entries, one bit each; `live_bytes`: the bytes
    of those. A run that ends meanwhile adds packs that have no size and no age here."""

    sizes: dict[str, int]
    ages: dict[str, float]
    live: dict[str, int]
    live_bytes: dict[str, int]


def collect(
    repository: Repository,
    *,
    now: float | None = None,
    dry_run: bool = False,
    bandwidth_bps: int | None = None,
    before: Sweep | None = None,
    on_looked: Callable[[int], None] = lambda bytes_read: None,
    on_sweep: Callable[[Sweep], None] = lambda sweep: None,
    on_progress: Callable[[Copied], None] = lambda copied: None,
    stop: Callable[[], bool] = lambda: False,
) -> Collected:
    """`now`: seconds since 1970; None: by the clock that dates the files, as by another one all might be old, or none.
    RepositoryDamaged, where anything cannot be read: then nothing was removed. Cancelled, once `stop()`. `bandwidth_bps`: the
    most bytes a second of pages that are read, and of chunks that are moved.

    `on_looked`: bytes that were read to find what is needed. `on_sweep` gets what is about to be done. `on_progress`: bytes of
    packs that are taken out of use, and what is moved out of them meanwhile; what is deleted or condemned is before the
    watermark. `before`: the last value for `on_sweep` of an interrupted collection that this one continues. What it did is
    counted; the rest is decided again."""
    repository.refresh()
    folder = repository.folder
    now = folder.clock() if now is None else now
    lists = condemned.lists_of(folder)
    bucket = None if bandwidth_bps is None else Bucket(bandwidth_bps)

    def about_to_read(count: int) -> None:
        _check(stop)
        if bucket is not None:
            bucket.take(count, stop)

    seen = _look(repository, now, on_looked, about_to_read)
    due = {name for one in lists if now - one.at >= GRACE_S for name in one.packs}
    waiting = {name for one in lists if now - one.at < GRACE_S for name in one.packs}
    listed = waiting | due
    old = [name for name, age in seen.ages.items() if age >= YOUNG_S and name not in listed]
    dead = sorted(name for name in due if name in seen.sizes and name not in seen.live)
    sparse = sorted(name for name in old if 0 < seen.live_bytes.get(name, 0) < seen.sizes[name] // 2)
    unneeded = sorted(name for name in old if name not in seen.live)
    sweep = Sweep(
        done=Collected() if before is None else before.cut_off(set(seen.sizes), listed),
        deleted={name: seen.sizes[name] for name in dead},
        condemned={name: seen.sizes[name] for name in (*sparse, *unneeded)},
        moved={name: seen.live_bytes[name] for name in sparse},
    )
    if not dry_run:
        sweeping = _Sweeping(repository, seen, _Figures(sweep, on_progress), stop, about_to_read)
        for part in sweep.parts():
            on_sweep(part)
            sweeping.do(part)
        for one in lists:
            # A damaged pack that is still needed stays condemned, so that no run relies on it again. So do, until the next
            # time, those deleted just now: NFS may still show them to a run that finds nothing condemned any more.
            if now - one.at >= GRACE_S and not any(name in seen.live or name in seen.sizes for name in one.packs):
                folder.delete(one.name)
        for entry in folder.entries(UNFINISHED):
            if now - entry.modified_at >= YOUNG_S:
                folder.delete(f"{UNFINISHED}/{entry.name}")
        repository.refresh()
    return sweep.collected()


def _check(stop: Callable[[], bool]) -> None:
    if stop():
        raise Cancelled


def _look(repository: Repository, now: float, on_looked: Callable[[int], None], about_to_read: Callable[[int], None]) -> _Seen:
    if repository.unreadable:
        name, why = next(iter(repository.unreadable.items()))
        raise RepositoryDamaged(
            f"nothing is removed while {counted(len(repository.unreadable), 'pack')} cannot be read; {name[:16]}…: {why}",
            hint="verify the repository; a pack that is beyond help may be moved away by hand",
        )
    sizes = repository.pack_sizes()
    ages = {entry.name: now - entry.modified_at for entry in repository.folder.entries(packs.FOLDER) if entry.name in sizes}
    live: dict[str, int] = defaultdict(int)
    live_bytes: dict[str, int] = defaultdict(int)
    for needed in _needed(repository, on_looked, about_to_read):
        place = repository.place(needed)
        if place is None:  # another process's run may have ended since the packs were listed: its point is seen here
            repository.refresh()
            place = repository.place(needed)
        if place is None:
            raise RepositoryDamaged(
                f"nothing is removed while chunk {needed.hex()[:16]} is in no pack", hint="verify the restore points"
            )
        if not live[place.pack] >> place.number & 1:
            live[place.pack] |= 1 << place.number
            live_bytes[place.pack] += place.entry.length
    return _Seen(sizes, ages, dict(live), dict(live_bytes))


def _needed(repository: Repository, on_looked: Callable[[int], None], about_to_read: Callable[[int], None]) -> Iterator[bytes]:
    """Each page, and each page's chunks, of all points. A chunk in several pages comes several times."""
    seen: set[str] = set()
    pages = 0
    for shown in repository.shown_all(repository.point_ids()):
        for disk in shown.disks:
            for page in {*disk.pages} - seen:
                seen.add(page)
                if (name := bytes.fromhex(page)) != NONE:
                    about_to_read(PAGE_BYTES)
                    yield name
                    yield from names_in(repository.read_page(name))
                    pages += 1
                    on_looked(pages * PAGE_BYTES)


class _Figures:
    """How much of a sweep is done, in bytes."""

    def __init__(self, sweep: Sweep, say: Callable[[Copied], None]) -> None:
        self._say, self._moved = say, 0
        self._total, self._done = (one.bytes_deleted + one.bytes_condemned for one in (sweep.collected(), sweep.done))

    def moved(self, count: int) -> None:
        """Not durable yet."""
        self._moved += count
        self._say(Copied(self._total, self._done + self._moved, 0, self._done))

    def gone(self, count: int) -> None:
        """Out of use."""
        self._done, self._moved = self._done + count, 0
        self._say(Copied(self._total, self._done, 0, self._done))


@dataclass(frozen=True)
class _Sweeping:
    """Takes packs out of use."""

    repository: Repository
    seen: _Seen
    figures: _Figures
    stop: Callable[[], bool]
    about_to_read: Callable[[int], None]

    def do(self, sweep: Sweep) -> None:
        """Does all of it, or raises Cancelled."""
        self._move(sweep)
        self._condemn(sweep, [name for name in sweep.condemned if name not in sweep.moved])
        for name, count in sweep.deleted.items():
            _check(self.stop)
            self.repository.folder.delete(f"{packs.FOLDER}/{name}")
            self.figures.gone(count)

    def _move(self, sweep: Sweep) -> None:
        """Moves what is needed of some packs into new ones. The old ones are condemned once it is durable in the new ones."""
        pack, emptied, stored = packs.Pack(), list[str](), 0
        for name in sweep.moved:
            for number, entry in enumerate(self.repository.index.entries(name)):
                if not self.seen.live[name] >> number & 1:
                    continue
                self.about_to_read(entry.length)
                if pack.names and not pack.fits(entry.length):
                    _store(self.repository, pack)
                    pack, stored = packs.Pack(pack.held), stored + 1
                    if stored % MOVED_AT_ONCE == 0:
                        self._condemn(sweep, emptied)
                        emptied = []
                frame = packs.read_frame(self.repository.folder, name, entry)
                pack.add(entry.name, entry.kind, frame, entry.content_length)
                self.figures.moved(entry.length)
            emptied.append(name)
        if pack.names:
            _store(self.repository, pack)
        self._condemn(sweep, emptied)

    def _condemn(self, sweep: Sweep, names: list[str]) -> None:
        condemn(self.repository.folder, names)
        self.figures.gone(sum(sweep.condemned[name] for name in names))


def _store(repository: Repository, pack: packs.Pack) -> None:
    name, content, tail = pack.closed()
    put(repository.folder, f"{packs.FOLDER}/{name}", [content])
    repository.index.add(name, len(content), tail)


def condemn(folder: Folder, names: Sequence[str]) -> None:
    """From here on no run relies on these packs: it writes again what it finds in them. They are deleted a day later, if
    nothing needs them. This is done to damaged packs too: the next backups store again what guests still have, which repairs
    older points too."""
    for at in range(0, len(names), CONDEMNED_AT_ONCE):
        content = "".join(f"{name}\n" for name in names[at : at + CONDEMNED_AT_ONCE]).encode()
        put(folder, f"{condemned.FOLDER}/{blake3(content).hexdigest()}", [content])
