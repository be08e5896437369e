"""What nothing needs any more, removed in two steps a day apart, so that no run loses what it relies on.

    collect:   every manifest, every page, every footer ─▶ what is needed
                 not needed, and old        ─▶ a list of condemned packs
                 condemned a day ago, and still not needed ─▶ deleted
                 half of a pack not needed  ─▶ what is, into a new pack; the old one is condemned

Frames are moved as they are: collecting needs no key. If anything cannot be read, nothing is removed: what a damaged manifest
needs is not known. Several may collect at once, and runs go on meanwhile: a run that relies on what is condemned before it has
committed is refused, and what is condemned after that is looked at again before it is deleted.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from blake3 import blake3

from synvirt.errors import RepositoryDamaged
from synvirt.model.values import Bytes, Model
from synvirt.repository import packs
from synvirt.repository.folder import UNFINISHED, Folder, put
from synvirt.repository.manifest import NONE, names_in
from synvirt.repository.repository import CONDEMNED_FOLDER, Repository, condemned_lists

GRACE_S = 24 * 3600
# What a run that is under way has written is needed by nothing yet. Longer than any run takes.
YOUNG_S = 7 * 24 * 3600


class Collected(Model):
    """What a collection did, or with a dry run would do."""

    packs_deleted: int = 0
    bytes_deleted: Bytes = 0
    packs_condemned: int = 0
    bytes_condemned: Bytes = 0
    bytes_moved: Bytes = 0


@dataclass(frozen=True)
class _Seen:
    """One look at all of the repository. `live`: of each pack that is needed, the entries for which it is, a bit each;
    `live_bytes`: the bytes of those. A run that ends meanwhile brings packs to these that have neither size nor age here."""

    sizes: dict[str, int]
    ages: dict[str, float]
    live: dict[str, int]
    live_bytes: dict[str, int]


def collect(
    repository: Repository, *, now: float, grace_s: float = GRACE_S, young_s: float = YOUNG_S, dry_run: bool = False
) -> Collected:
    """`now`: seconds since 1970. RepositoryDamaged, where anything cannot be read: nothing was removed then."""
    repository.refresh()
    lists = condemned_lists(repository.folder)
    seen = _look(repository, now)
    due = {name for one in lists if now - one.at >= grace_s for name in one.packs}
    waiting = {name for one in lists if now - one.at < grace_s for name in one.packs}
    dead = sorted(name for name in due if name in seen.sizes and name not in seen.live)
    dead_bytes = sum(seen.sizes[name] for name in dead)
    sparse = sorted(
        name
        for name, age in seen.ages.items()
        if name not in waiting | due and age >= young_s and 0 < seen.live_bytes.get(name, 0) < seen.sizes[name] // 2
    )
    unneeded = sorted(
        name for name, age in seen.ages.items() if name not in seen.live and name not in waiting | due and age >= young_s
    )
    moved = sum(seen.live_bytes[name] for name in sparse)
    if not dry_run:
        _move(repository, {name: seen.live[name] for name in sparse})
        condemn(repository.folder, [*unneeded, *sparse])
        for name in dead:
            repository.folder.delete(f"{packs.FOLDER}/{name}")
        for one in lists:
            # A damaged pack that is still needed stays condemned: what is in it is not relied on again.
            if now - one.at >= grace_s and not any(name in seen.live for name in one.packs):
                repository.folder.delete(one.name)
        for entry in repository.folder.entries(UNFINISHED):
            if now - entry.modified_at >= young_s:
                repository.folder.delete(f"{UNFINISHED}/{entry.name}")
        repository.refresh()
    condemned = [*unneeded, *sparse]
    return Collected(
        packs_deleted=len(dead),
        bytes_deleted=dead_bytes,
        packs_condemned=len(condemned),
        bytes_condemned=sum(seen.sizes[name] for name in condemned),
        bytes_moved=moved,
    )


def _look(repository: Repository, now: float) -> _Seen:
    if repository.unreadable:
        name, why = next(iter(repository.unreadable.items()))
        raise RepositoryDamaged(
            f"nothing is removed while {len(repository.unreadable)} pack(s) cannot be read; {name[:16]}…: {why}",
            hint="verify the repository; a pack that is beyond help may be moved away by hand",
        )
    sizes = repository.pack_sizes()
    ages = {entry.name: now - entry.modified_at for entry in repository.folder.entries(packs.FOLDER) if entry.name in sizes}
    live: dict[str, int] = defaultdict(int)
    live_bytes: dict[str, int] = defaultdict(int)
    for needed in _needed(repository):
        place = repository.place(needed)
        if place is None:
            raise RepositoryDamaged(
                f"nothing is removed while chunk {needed.hex()[:16]} is in no pack", hint="verify the restore points"
            )
        if not live[place.pack] >> place.number & 1:
            live[place.pack] |= 1 << place.number
            live_bytes[place.pack] += place.entry.length
    return _Seen(sizes, ages, dict(live), dict(live_bytes))


def _needed(repository: Repository) -> Iterator[bytes]:
    """Each page, and each page's chunks, of all points. A chunk of several pages comes several times."""
    seen: set[str] = set()
    for shown in repository.shown_all(repository.point_ids()):
        for disk in shown.disks:
            for page in {*disk.pages} - seen:
                seen.add(page)
                if (name := bytes.fromhex(page)) != NONE:
                    yield name
                    yield from names_in(repository.read_page(name))


def _move(repository: Repository, chosen: dict[str, int]) -> None:
    """Of each pack the frames that are chosen, a bit each, into new packs; durable when this returns."""
    pack = packs.Pack()
    for name, bits in chosen.items():
        for number, entry in enumerate(repository.index.entries(name)):
            if not bits >> number & 1:
                continue
            if pack.names and not pack.fits(entry.length):
                _store(repository, pack)
                pack = packs.Pack()
            pack.add(entry.name, entry.kind, packs.read_frame(repository.folder, name, entry), entry.content_length)
    if pack.names:
        _store(repository, pack)


def _store(repository: Repository, pack: packs.Pack) -> None:
    name, content, tail = pack.closed()
    put(repository.folder, f"{packs.FOLDER}/{name}", [content])
    repository.index.add(name, len(content), tail)


def condemn(folder: Folder, names: Sequence[str]) -> None:
    """No run relies on these packs from here on: what it finds in them it writes again. They go a day later, if nothing needs
    them. Damaged ones too: the next backups store again what guests still have, which repairs the older points too."""
    if names:
        content = "".join(f"{name}\n" for name in names).encode()
        put(folder, f"{CONDEMNED_FOLDER}/{blake3(content).hexdigest()}", [content])
