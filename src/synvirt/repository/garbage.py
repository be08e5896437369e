"""What nothing needs any more, removed in two steps a day apart, so that no run loses what it relies on.

    collect:   every manifest, every page, every footer ─▶ what is needed
                 not needed, and old        ─▶ a list of condemned packs
                 condemned a day ago, and still not needed ─▶ deleted
                 half of a pack not needed  ─▶ what is, into a new pack; the old one is condemned

Frames are moved as they are: collecting needs no key. If anything cannot be read, nothing is removed: what a damaged manifest
needs is not known. Several may collect at once, and runs go on meanwhile: a run that relies on what is condemned before it has
committed is refused, and what is condemned after that is looked at again before it is deleted.

A collection that a kill cut off looks at all of that again: a backup may have come to need what was about to go. What was
moved, condemned or deleted by then is done.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from blake3 import blake3

from synvirt.copying import Copied
from synvirt.errors import Cancelled, RepositoryDamaged
from synvirt.model.values import Bytes, Model
from synvirt.repository import packs
from synvirt.repository.folder import UNFINISHED, Folder, put
from synvirt.repository.manifest import NONE, PAGE_BYTES, names_in
from synvirt.repository.repository import CONDEMNED_FOLDER, Repository, condemned_lists
from synvirt.sizes import counted

GRACE_S = 24 * 3600
# What a run that is under way has written is needed by nothing yet. Longer than any run takes.
YOUNG_S = 7 * 24 * 3600
# New packs, 64 MiB each, until those that they were filled from are condemned: what a kill makes a collection move again at the
# most. Each list of condemned packs is a file that every run reads.
MOVED_AT_ONCE = 16
# Packs that go, and packs that are condemned, in one part of a sweep: half a MiB of names, kept before the part is done.
SWEPT_AT_ONCE = 2048
# Packs in one list: 7 MiB, where a list of over CONDEMNED_BYTES_MAX is read by nobody.
CONDEMNED_AT_ONCE = 100_000


class Collected(Model):
    """What a collection did, or with a dry run would do."""

    packs_deleted: int = 0
    bytes_deleted: Bytes = 0
    packs_condemned: int = 0
    bytes_condemned: Bytes = 0
    bytes_moved: Bytes = 0


class Sweep(Model):
    """What a collection is about to take out of use: bytes by the pack's name. `moved`: of some that are condemned, what is
    needed. `done`: what it had done before."""

    done: Collected = Collected()
    deleted: dict[str, Bytes]
    condemned: dict[str, Bytes]
    moved: dict[str, Bytes]

    def parts(self) -> Iterator["Sweep"]:
        """The same in parts of SWEPT_AT_ONCE packs, one at least. Each is to be done before the next."""
        done = self.done
        for at in range(0, max(len(self.deleted), len(self.condemned), 1), SWEPT_AT_ONCE):
            deleted, condemned = (
                dict(islice(swept.items(), at, at + SWEPT_AT_ONCE)) for swept in (self.deleted, self.condemned)
            )
            moved = {name: self.moved[name] for name in condemned if name in self.moved}
            yield (part := Sweep(done=done, deleted=deleted, condemned=condemned, moved=moved))
            done = part.collected()

    def cut_off(self, there: set[str], condemned: set[str]) -> Collected:
        """What was done of it, and before it, where a kill came. `there`, `condemned`: the packs as they are now."""
        return Sweep(
            done=self.done,
            deleted=_those(self.deleted, lambda name: name not in there),
            condemned=_those(self.condemned, lambda name: name in condemned),
            moved=_those(self.moved, lambda name: name in condemned),
        ).collected()

    def collected(self) -> Collected:
        """What is done once it is, and what was before it."""
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
    """One look at all of the repository. `live`: of each pack that is needed, the entries for which it is, a bit each;
    `live_bytes`: the bytes of those. A run that ends meanwhile brings packs to these that have neither size nor age here."""

    sizes: dict[str, int]
    ages: dict[str, float]
    live: dict[str, int]
    live_bytes: dict[str, int]


def collect(
    repository: Repository,
    *,
    now: float,
    grace_s: float = GRACE_S,
    young_s: float = YOUNG_S,
    dry_run: bool = False,
    before: Sweep | None = None,
    on_looked: Callable[[int], None] = lambda bytes_read: None,
    on_sweep: Callable[[Sweep], None] = lambda sweep: None,
    on_progress: Callable[[Copied], None] = lambda copied: None,
    stop: Callable[[], bool] = lambda: False,
) -> Collected:
    """`now`: seconds since 1970. RepositoryDamaged, where anything cannot be read: nothing was removed then. Cancelled, once
    `stop()`.

    `on_looked`: bytes that were read to find what is needed. `on_sweep` hears what is about to be done. `on_progress`: bytes of
    packs that are taken out of use, and what is moved out of them meanwhile; what is deleted or condemned is before the
    watermark. `before`: what `on_sweep` heard last of a collection that was cut off, and that this one goes on with. What was
    done of that is counted; what was not is decided again."""
    repository.refresh()
    folder = repository.folder
    lists = condemned_lists(folder)
    seen = _look(repository, now, on_looked, stop)
    due = {name for one in lists if now - one.at >= grace_s for name in one.packs}
    waiting = {name for one in lists if now - one.at < grace_s for name in one.packs}
    listed = waiting | due
    old = [name for name, age in seen.ages.items() if age >= young_s and name not in listed]
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
        sweeping = _Sweeping(repository, seen, _Figures(sweep, on_progress), stop)
        for part in sweep.parts():
            on_sweep(part)
            sweeping.do(part)
        for one in lists:
            # A damaged pack that is still needed stays condemned: what is in it is not relied on again.
            if now - one.at >= grace_s and not any(name in seen.live for name in one.packs):
                folder.delete(one.name)
        for entry in folder.entries(UNFINISHED):
            if now - entry.modified_at >= young_s:
                folder.delete(f"{UNFINISHED}/{entry.name}")
        repository.refresh()
    return sweep.collected()


def _check(stop: Callable[[], bool]) -> None:
    if stop():
        raise Cancelled


def _look(repository: Repository, now: float, on_looked: Callable[[int], None], stop: Callable[[], bool]) -> _Seen:
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
    for needed in _needed(repository, on_looked, stop):
        place = repository.place(needed)
        if place is None:
            raise RepositoryDamaged(
                f"nothing is removed while chunk {needed.hex()[:16]} is in no pack", hint="verify the restore points"
            )
        if not live[place.pack] >> place.number & 1:
            live[place.pack] |= 1 << place.number
            live_bytes[place.pack] += place.entry.length
    return _Seen(sizes, ages, dict(live), dict(live_bytes))


def _needed(repository: Repository, on_looked: Callable[[int], None], stop: Callable[[], bool]) -> Iterator[bytes]:
    """Each page, and each page's chunks, of all points. A chunk of several pages comes several times."""
    seen: set[str] = set()
    pages = 0
    for shown in repository.shown_all(repository.point_ids()):
        for disk in shown.disks:
            for page in {*disk.pages} - seen:
                seen.add(page)
                if (name := bytes.fromhex(page)) != NONE:
                    _check(stop)
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

    def do(self, sweep: Sweep) -> None:
        """All of it, or Cancelled."""
        self._move(sweep)
        self._condemn(sweep, [name for name in sweep.condemned if name not in sweep.moved])
        for name, count in sweep.deleted.items():
            _check(self.stop)
            self.repository.folder.delete(f"{packs.FOLDER}/{name}")
            self.figures.gone(count)

    def _move(self, sweep: Sweep) -> None:
        """What is needed of some packs into new ones. They are condemned once it is durable there."""
        pack, emptied, stored = packs.Pack(), list[str](), 0
        for name in sweep.moved:
            for number, entry in enumerate(self.repository.index.entries(name)):
                if not self.seen.live[name] >> number & 1:
                    continue
                _check(self.stop)
                if pack.names and not pack.fits(entry.length):
                    _store(self.repository, pack)
                    pack, stored = packs.Pack(), stored + 1
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
    """No run relies on these packs from here on: what it finds in them it writes again. They go a day later, if nothing needs
    them. Damaged ones too: the next backups store again what guests still have, which repairs the older points too."""
    for at in range(0, len(names), CONDEMNED_AT_ONCE):
        content = "".join(f"{name}\n" for name in names[at : at + CONDEMNED_AT_ONCE]).encode()
        put(folder, f"{CONDEMNED_FOLDER}/{blake3(content).hexdigest()}", [content])
