"""A whole house of fakes for a job to run in: real store, real copy workers, real volumes; fake platform and hypervisor.

`House.run` does what the engine does, without a runner: it moves a job until it ends. `Crash` at a chosen commit, then `run`
again by a new House over the same folder, is a service that was killed and started.
"""

import asyncio
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

from sqlalchemy import update

from synvirt.destinations import Destination
from synvirt.destinations.directory import DirectoryDestination
from synvirt.disks import open_reader
from synvirt.disks.beneath import resolve_beneath
from synvirt.disks.specs import RawSpec
from synvirt.fleet.sharing import rate_of
from synvirt.guests import GuestPreparer
from synvirt.jobs.board import Board
from synvirt.jobs.process import Workers, started
from synvirt.jobs.slots import Slots
from synvirt.jobs.stop import Stop
from synvirt.keyring import Keyring
from synvirt.live import LiveAdapter
from synvirt.machines.loader import Loader
from synvirt.migrations.advance import advance
from synvirt.migrations.intake import Intake, check_corrected, check_free, check_plan
from synvirt.migrations.planning.repairable import repair_of
from synvirt.migrations.rooms import Rooms
from synvirt.migrations.secrets import JobSecrets
from synvirt.migrations.uploads import Uploads
from synvirt.model.job import Migration
from synvirt.model.kinds import ENDS, LiveKind, OfflineKind, State
from synvirt.model.plan import MigrationPlan
from synvirt.offline.elsewhere import Rules
from synvirt.offline.registry import BY_KIND, detect
from synvirt.proof.keeping import Receipts
from synvirt.proof.signing import HostKey
from synvirt.proof.unpacking import unpack
from synvirt.proof.verifying import checked, differing, volumes
from synvirt.settings import Settings
from synvirt.store import Store
from synvirt.store.tables import migrations
from tests.fakes.exports import FakeExports
from tests.fakes.guests import FakePreparer
from tests.fakes.hypervisor import FakeHypervisor
from tests.fakes.live import FakeAdapter, FakePlatform
from tests.fakes.loops import StoreAtOnce
from tests.fakes.offline import FakeImporter
from tests.fakes.workers import in_process

SOURCE_ID = UUID(int=7)
VM = "vm-1"


class Crash(BaseException):
    """The service dies here: nothing of ours may catch it."""


class SharedDirectory(DirectoryDestination):
    """A folder that several hosts reach, as a Ceph pool."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        folder.mkdir(exist_ok=True)

    def shared_id(self) -> str:
        return str(self.folder)


class House:
    def __init__(
        self,
        folder: Path,
        *,
        store_url: str | None = None,
        hypervisor: FakeHypervisor | None = None,
        preparer: FakePreparer | None = None,
        real_preparer: GuestPreparer | None = None,
        family: str = "linux",
        destination: Destination | None = None,
        others: dict[str, Destination] | None = None,
        real_importers: bool = False,
        workers: Workers = started,
        host: str = "local",
        shared: Path | None = None,
    ) -> None:
        """`shared`: the folder of what several hosts reach, the platform and the destination. `real_importers`: those of the
        product, instead of the fake that serves ovf_folder."""
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.platform = FakePlatform((shared or folder) / "platform")
        # By the ids of their sources, which a test registers.
        self.other_platforms: dict[UUID, FakePlatform] = {}
        self.store = Store(store_url or f"sqlite:///{folder / 'store.db'}")
        # Facts of a guest from its disks.
        self.disks_say: dict[str, str] = {}
        self.loaders: list[Loader] = []
        self.uploads = Uploads(self.store.uploads, Settings(data_dir=folder))
        self.hypervisor = hypervisor or FakeHypervisor()
        self.preparer = preparer or FakePreparer()
        self.preparer.folder = folder / "conversions"
        self.imports = folder / "imports"
        self.imports.mkdir(exist_ok=True)
        (folder / "volumes").mkdir(exist_ok=True)
        here = DirectoryDestination(folder / "volumes") if shared is None else SharedDirectory(shared / "volumes")
        self.destination: Destination = destination or here
        self.board = Board()
        self.secrets = JobSecrets(self.store, Keyring(folder / "migrator.key"))
        self.rooms = Rooms(
            store=self.store,
            board=self.board,
            import_root=self.imports,
            resolve=lambda path: resolve_beneath(self.imports, path),
            upload_path=lambda upload_id: self.uploads.get(upload_id).path,
            importers=BY_KIND if real_importers else {OfflineKind.OVF_FOLDER: FakeImporter(family)},
            detect=detect if real_importers else (lambda path, root: FakeImporter(family)),
            secret_of=self.secrets.opened,
            remote_rules=Rules(allowed_hosts=("127.0.0.0/8",)),
            connect=self.connect,
            destinations={"chosen": self.destination, **(others or {})},
            hypervisor=self.hypervisor,
            preparer=real_preparer or self.preparer,
            workers=workers,
            host=host,
            slots=Slots(self.store.slots, host=host),
            rate_of=partial(rate_of, self.store.waves),
            exports=FakeExports(folder / "instant"),
            receipts=Receipts(folder / "receipts", HostKey(folder / "receipts.key", host)),
            look_inside=lambda *_: dict(self.disks_say),
            find_loaders=lambda *_: list(self.loaders),
            boot_timeout_s=5,
            # Often, so that a pass of a few MiB has watermarks to crash at.
            flush_every_s=0.05,
        )
        # The store's threads are there where the workers are processes, as in the service, and where the platform is a service:
        # what tests do at a commit asks it in a loop of its own, which a thread with a loop cannot have.
        only_fakes = workers is in_process and type(self).connect is House.connect
        self._loop = StoreAtOnce if only_fakes else None
        self.stops: dict[UUID, Stop] = {}
        self.intake = Intake(
            self.store,
            self.board,
            host=host,
            check=(lambda plan: check_plan(self.rooms, plan)) if real_importers else (lambda plan: None),
            begin=lambda job_id: None,
            wake=self.wake,
            secrets=self.secrets,
            check_corrected=partial(check_corrected, self.rooms),
            claim=partial(check_free, self.rooms),
            repair=partial(repair_of, self.rooms),
        )

    async def connect(self, kind: LiveKind, source_id: UUID) -> LiveAdapter:
        return FakeAdapter(self.platform if source_id == SOURCE_ID else self.other_platforms[source_id])

    def wake(self, job_id: UUID) -> None:
        stop = self.stops.setdefault(job_id, Stop())
        if self.store.cancel_requested(job_id):
            stop.set()
        stop.wake()

    def run(self, job_id: UUID) -> Migration:
        """Move the job until it ends, as the engine does."""
        stop = self.stops.setdefault(job_id, Stop())

        async def until_the_end() -> Migration:
            while True:
                job, cancelled = await asyncio.to_thread(self.store.get_to_run, job_id)
                if job.state in ENDS:
                    return job
                if cancelled:
                    stop.set()
                await advance(self.rooms, job, stop)

        with asyncio.Runner(loop_factory=self._loop) as runner:
            return runner.run(until_the_end())

    def volume(self, job: Migration, key: str = "disk-0") -> Path:
        name = next(disk.volume for disk in job.disks if disk.key == key)
        assert name is not None
        return Path(self.destination.device(name))

    def leftovers(self, vm_id: str | None = None) -> list[str]:
        """What a job that ended badly should not have left anywhere."""
        left = [
            str(path)
            for folder in ("volumes", "conversions", "receipts/hashes", "instant")
            for path in (self.folder / folder).rglob("*")
        ]
        left += [f"domain {uuid}" for uuid in self.hypervisor.domains]
        if vm_id is not None:
            left += [f"snapshot {name}" for name in self.platform.vm(vm_id)["snapshots"]]
        return left

    def copies(self) -> set[str]:
        """What failed jobs keep: volumes, and the hashes of what is in them."""
        return {str(path) for kept in ("volumes", "receipts/hashes") for path in (self.folder / kept).rglob("*")}

    def prove(self, job: Migration) -> None:
        """The job's receipt is good, and of what its volumes hold."""
        assert self.rooms.receipts is not None
        with self.rooms.receipts.path_of(job.id).open("rb") as tar:
            folder = unpack(tar, self.folder / "unpacked", f"receipt-{job.id}")
        found = checked(folder, self.rooms.receipts.key.public)
        assert found.problems == ()
        assert found.statement is not None
        for disk in volumes(found.statement):
            with closing(open_reader(RawSpec(path=str(self.volume(job, disk["key"]))))) as volume:
                assert list(differing(folder, disk, volume)) == []
        assert list((self.folder / "receipts/hashes").iterdir()) == []

    def close(self) -> None:
        self.store.close()


def live_plan(mode: str = "Warm", **fields: Any) -> MigrationPlan:
    return MigrationPlan.model_validate(
        {
            "source": {"Live": "libvirt_remote"},
            "source_ref": {"kind": "live_vm", "source_id": str(SOURCE_ID), "vm_id": VM},
            "mode": mode,
            **fields,
        }
    )


def offline_plan(path: Path, mode: str = "Cold", kind: str = "ovf_folder", **fields: Any) -> MigrationPlan:
    return MigrationPlan.model_validate(
        {
            "source": {"Offline": kind},
            "source_ref": {"kind": "offline_host_path", "path": str(path)},
            "mode": mode,
            **fields,
        }
    )


def give_to(store: Store, job_id: UUID, host: str) -> None:
    """Gives a job to another host, as when its own was lost; it stays the same job."""
    with store._writing() as db:
        db.execute(update(migrations).where(migrations.c.id == str(job_id)).values(host=host))


def states(job: Migration) -> list[State]:
    return [visit.state for visit in job.history]


def crash_at(commit: int) -> Callable[[], None]:
    """An on_commit that raises Crash right after the given commit, counted from 1."""
    seen = 0

    def committed() -> None:
        nonlocal seen
        seen += 1
        if seen == commit:
            raise Crash

    return committed
