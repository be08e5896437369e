"""Guests for backups that are files: `Backups` is the real one, and what it backs up are a folder's images."""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import UUID

from synvirt.backups.authors import Authors
from synvirt.backups.limits import Limits
from synvirt.backups.model import ENDS, BackupRun
from synvirt.backups.offers import Offers
from synvirt.backups.repositories import Repositories
from synvirt.backups.restores.host import RestoreHost
from synvirt.backups.service import Backups
from synvirt.backups.sources.guest import Ask, Guest, SourceDisk, Sources
from synvirt.backups.working import Working
from synvirt.disks.specs import RawSpec, ReaderSpec
from synvirt.errors import BackupNotFound, SourceRunning
from synvirt.jobs.process import Workers
from synvirt.proof.signing import HostKey
from synvirt.repository.manifest import Mark
from synvirt.store import Store
from tests.fakes.workers import in_process

# Of a run of some megabytes, on a machine with much else to do.
ENDS_WITHIN_S = 60
# How often a run that is under way is looked at all the same.
LOOK_EVERY_S = 0.5


class FakeGuests:
    """Guests of one raw disk each, named by its file; `xml`: their definition, where it has more than a name. `gate` is called
    when a run opens one, and holds it there. `mark`: what a later run could count changes from; `bases`: the points that runs
    were given to count from. `reader`: how a disk is read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(exist_ok=True)
        self.changed = False
        self.xml: str | None = None
        self.mark: Mark | None = None
        self.bases: list[UUID | None] = []
        self.gate: Callable[[], object] = lambda: None
        self.reader: Callable[[str], ReaderSpec] = lambda path: RawSpec(path=path)

    def image(self, name: str, content: bytes) -> None:
        (self._folder / name).write_bytes(content)

    def remove(self, name: str) -> None:
        (self._folder / name).unlink()

    def id_of(self, vm_id: str) -> str:
        name = vm_id.removeprefix("id-of-")
        if not (self._folder / name).exists():
            raise BackupNotFound(f"this host has no domain {vm_id}")
        return f"id-of-{name}"

    @contextlib.contextmanager
    def open(self, ask: Ask) -> Iterator[Guest]:
        self.gate()
        vm_id = ask.vm_id
        path = self._folder / vm_id
        if not path.exists():
            raise BackupNotFound(f"this host has no domain {vm_id}")

        def check() -> None:
            if self.changed:
                raise SourceRunning(f"{vm_id} was started")

        base = ask.base(f"id-of-{vm_id}")
        self.bases.append(None if base is None else base.shown.id)
        disk = SourceDisk("vda", str(path), self.reader(str(path)), mark=self.mark)
        moment = f"{path.stat().st_ino} {path.stat().st_mtime_ns}"
        xml = self.xml or f"<domain name='{vm_id}'/>"
        yield Guest(f"id-of-{vm_id}", vm_id, xml, "bnZyYW0=", None, (disk,), check, moment=moment, base=base)


def authors_of(folder: Path, *, host: str = "local", signers: Path | None = None) -> Authors:
    (folder / "keyring").mkdir(exist_ok=True)
    return Authors(HostKey(folder / "keyring/receipts.key", host), signers)


def backups_of(
    store: Store,
    guests: FakeGuests | Sources,
    folder: Path,
    workers: Workers = in_process,
    limits: Limits | None = None,
    authors: Authors | None = None,
    offers: Offers | None = None,
    restore_host: RestoreHost | None = None,
) -> Backups:
    """Not started yet. `folder` gets `keyring`, `journals` and `exports`. Its disks are copied by workers in this process,
    where no others are given; its points are signed by a key of its own."""
    (folder / "keyring").mkdir(exist_ok=True)
    repositories = Repositories(store.backups, host="local", keyring=folder / "keyring", authors=authors or authors_of(folder))
    return Backups(
        store.backups,
        repositories,
        host="local",
        open_guest=guests.open,
        guest_id=guests.id_of,
        exports=folder / "exports",
        working=Working(workers),
        journals=folder / "journals",
        limits=limits,
        offers=offers,
        restore_host=restore_host,
    )


def ended(backups: Backups, run_id: UUID | str, *, within_s: float = ENDS_WITHIN_S) -> BackupRun:
    """The run, once it has."""
    run_id, until, pause_s = UUID(str(run_id)), time.monotonic() + within_s, 0.01
    while (run := backups.runs.get(run_id)).status not in ENDS:
        assert time.monotonic() < until, run
        time.sleep(pause_s)
        # A look takes a millisecond of the processor that the run needs; thirty, where it is emulated.
        look_at = time.monotonic() + LOOK_EVERY_S
        while run_id in backups.runs._begun and time.monotonic() < look_at:
            time.sleep(pause_s)
        pause_s = min(pause_s * 1.2, 0.05)
    return run
