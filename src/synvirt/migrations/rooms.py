"""What the steps of a job work with: the rooms of the house, put together by main.py."""

import threading
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from uuid import UUID

from synvirt.destinations import Destination
from synvirt.disks.roots import Root, connected
from synvirt.errors import InvalidPlan, NotFound
from synvirt.guests import GuestPreparer
from synvirt.hypervisor import Hypervisor
from synvirt.jobs.board import Board
from synvirt.jobs.exports import Exports
from synvirt.jobs.process import Workers, started
from synvirt.jobs.slots import Slots, Turns
from synvirt.jobs.waiting import Waiting
from synvirt.live import LiveAdapter
from synvirt.live.sessions import Sessions
from synvirt.migrations.secrets import no_secrets
from synvirt.migrations.sharing import SharedRate
from synvirt.model.job import Migration
from synvirt.model.kinds import LiveKind, OfflineKind
from synvirt.model.plan import HostPathRef, RemoteUrlRef, UploadRef
from synvirt.offline import OfflineImporter
from synvirt.offline.browsing import ELSEWHERE_WITHIN_S
from synvirt.offline.elsewhere import Rules, place
from synvirt.offline.passthrough import Passthrough
from synvirt.proof.keeping import Receipts
from synvirt.store import Store


def _no_source(_kind: LiveKind, source_id: UUID) -> None:
    raise NotFound(f"no source {source_id} is registered")


def _connected(root: Root) -> AbstractContextManager[None]:
    return connected(root, within_s=ELSEWHERE_WITHIN_S)


@dataclass(frozen=True)
class Rooms:
    """`resolve` turns a plan's path into the real path under `import_root`, or raises HostPathRejected; `upload_path` says
    where an upload lies, or raises UploadNotFound; `detect` says which importer a path under a root is for; `secret_of`
    opens what was sealed with a job. `connect` opens a session with a
    registered source; the caller closes it. `check_source` raises NotFound, or InvalidPlan for another kind.
    `destinations` go by the names that plans may use, the default first. The store and all that lies below it block: call them
    in threads."""

    store: Store
    board: Board
    import_root: Path
    resolve: Callable[[str], Path]
    upload_path: Callable[[UUID], str]
    importers: Mapping[OfflineKind, OfflineImporter]
    detect: Callable[[Path | str, Root], OfflineImporter]
    connect: Callable[[LiveKind, UUID], Awaitable[LiveAdapter]]
    destinations: Mapping[str, Destination]
    hypervisor: Hypervisor
    preparer: GuestPreparer
    slots: Slots
    host: str
    check_source: Callable[[LiveKind, UUID], None] = _no_source
    # Bytes a second by way of reading, as the last deep test of the source measured them.
    rates_of: Callable[[UUID], Mapping[str, float]] = lambda source_id: {}
    # Outside programs that may import a kind whole, where its importer would be asked disk by disk.
    passthroughs: Mapping[OfflineKind, Passthrough] = field(default_factory=dict)
    secret_of: Callable[[UUID], bytes | None] = no_secrets
    remote_rules: Rules = field(default_factory=Rules)
    # Holds a Remote open while an importer is asked several things; one that asks elsewhere connects there by itself.
    connected: Callable[[Root], AbstractContextManager[None]] = _connected
    # How many jobs read from a host of a source at once, or from all its hosts, or write a destination, over all hosts of ours;
    # and how many work here at all.
    jobs_per_source: int = 4
    jobs_per_source_in_all: int = 16
    jobs_per_destination: int = 16
    turns: Turns = field(default_factory=lambda: Turns(256))
    workers: Workers = started
    # Jobs that wait for a source: changing the source wakes them.
    waiting: Waiting = field(default_factory=Waiting)
    # What a job's copies share with those of other jobs. Blocks.
    rate_of: Callable[[Migration], SharedRate | None] = lambda job: None
    # None: no guest is started before its copy is whole.
    exports: Exports | None = None
    # None: jobs end without one, and nothing is hashed.
    receipts: Receipts | None = None
    boot_timeout_s: float = 600
    copy_threads: int | None = None
    flush_every_s: float = 5.0
    # Held while volumes are cloned for a rehearsal, or it is called off before they are.
    cloning: threading.Lock = field(default_factory=threading.Lock)
    # Of the jobs; made of `connect`.
    sessions: Sessions = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sessions", Sessions(self._adapter))

    async def _adapter(self, kind: LiveKind, source_id: UUID) -> LiveAdapter:
        return await self.connect(kind, source_id)

    @property
    def destination(self) -> Destination:
        """Where volumes go when a plan does not say."""
        return self.destination_named(None)

    def destination_named(self, name: str | None) -> Destination:
        """The default, where there is no name. InvalidPlan, where there is no such destination."""
        found = self.destinations.get(name or next(iter(self.destinations)))
        if found is None:
            raise InvalidPlan(f"this host has no destination {name}", hint=f"it has {', '.join(self.destinations)}")
        return found

    def place(self, ref: HostPathRef | UploadRef | RemoteUrlRef) -> tuple[Path, Root]:
        """Where an Offline plan's file or folder lies, and the root that its files lie under."""
        match ref.kind:
            case "remote_url":
                return place(ref, self.remote_rules)
            case "upload":
                return self.resolve(self.upload_path(ref.upload_id)), self.import_root
            case "offline_host_path":
                return self.resolve(ref.path), self.import_root
