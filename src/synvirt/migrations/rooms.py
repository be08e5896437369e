"""What the steps of a job work with. `main/` assembles it."""

import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
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
from synvirt.machines.loader import Loader
from synvirt.migrations.secrets import no_secrets
from synvirt.migrations.sharing import SharedRate
from synvirt.model.job import Migration
from synvirt.model.kinds import LiveKind, OfflineKind
from synvirt.model.machine import VmManifest
from synvirt.model.plan import HostPathRef, MigrationPlan, RemoteUrlRef, UploadRef
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
    """`resolve`: the real path of a plan's path under `import_root`, or HostPathRejected. `upload_path`: the path of an upload,
    or UploadNotFound. `detect`: the importer for a path under a root. `secret_of`: the opened secrets of a job. `connect`:
    opens a session with a registered source; the caller closes it. `check_source`: NotFound, or InvalidPlan for another kind.
    `destinations`: by the names that plans use, the default first. The store and what comes after it block: call them in
    threads."""

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
    # Bytes a second for each way of reading, as the last deep test of the source measured them.
    rates_of: Callable[[UUID], Mapping[str, float]] = lambda source_id: {}
    # Outside programs that may import a whole VM of a kind, instead of its importer disk by disk.
    passthroughs: Mapping[OfflineKind, Passthrough] = field(default_factory=dict)
    secret_of: Callable[[UUID], bytes | None] = no_secrets
    remote_rules: Rules = field(default_factory=Rules)
    # Keeps a Remote connected while an importer is asked several questions.
    connected: Callable[[Root], AbstractContextManager[None]] = _connected
    # How many jobs at once read from a host of a source, read from all its hosts, or write to a destination, over all our
    # hosts. `turns`: how many work on this host.
    jobs_per_source: int = 4
    jobs_per_source_in_all: int = 16
    jobs_per_destination: int = 16
    turns: Turns = field(default_factory=lambda: Turns(256))
    workers: Workers = started
    # Jobs that wait for a source. A change of the source wakes them.
    waiting: Waiting = field(default_factory=Waiting)
    # The rate that a job's copies share with other jobs' copies. Blocks.
    rate_of: Callable[[Migration], SharedRate | None] = lambda job: None
    # None: no guest starts before its copy is complete.
    exports: Exports | None = None
    # None: jobs end without a receipt, and nothing is hashed.
    receipts: Receipts | None = None
    # Facts of a guest from its disks, which nothing writes to meanwhile (guests/inside); and loaders that no firmware finds by
    # itself. The mapping: of devices that are overlays, the raw file under each.
    look_inside: Callable[[Sequence[str], Callable[[], bool], Mapping[str, str]], dict[str, str]] = lambda *_: {}
    find_loaders: Callable[[Sequence[str], Callable[[], bool], Mapping[str, str]], Sequence[Loader]] = lambda *_: ()
    boot_timeout_s: float = 600
    copy_threads: int | None = None
    flush_every_s: float = 5.0
    # Locked while volumes are cloned for a rehearsal, or the rehearsal is cancelled before that.
    cloning: threading.Lock = field(default_factory=threading.Lock)
    # Sessions of the jobs, made by `connect`.
    sessions: Sessions = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sessions", Sessions(self.connect))

    @property
    def destination(self) -> Destination:
        """The destination of volumes when a plan names none."""
        return self.destination_named(None)

    def destination_named(self, name: str | None) -> Destination:
        """The destination of that name; without a name, the default. InvalidPlan, where there is no such destination."""
        found = self.destinations.get(name or next(iter(self.destinations)))
        if found is None:
            raise InvalidPlan(f"this host has no destination {name}", hint=f"it has {', '.join(self.destinations)}")
        return found

    def converts(self, plan: MigrationPlan, manifest: VmManifest | None) -> bool:
        """Whether drivers are installed in the plan's guest. `manifest` None: it is not known yet."""
        wanted = plan.conversion == "auto" and manifest is not None and self.preparer.wants(manifest)
        return wanted or plan.conversion == "always"

    def place(self, ref: HostPathRef | UploadRef | RemoteUrlRef) -> tuple[Path, Root]:
        """The path of an Offline plan's file or folder, and the root that its files are under."""
        match ref.kind:
            case "remote_url":
                return place(ref, self.remote_rules)
            case "upload":
                return self.resolve(self.upload_path(ref.upload_id)), self.import_root
            case "offline_host_path":
                return self.resolve(ref.path), self.import_root
