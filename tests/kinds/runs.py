"""Runs of backups over guests that are files: real repositories, real workers' code, no hypervisor."""

import json
import os
import random
from collections.abc import Sequence
from uuid import UUID

import pytest

from synvirt.backups import upkeep
from synvirt.backups.limits import Limits
from synvirt.backups.model import ENDS, BackupJobRequest, BackupRepositoryRequest, RestorePoint, RestoreRequest, Status
from synvirt.backups.restores.host import RestoreHost
from synvirt.backups.service import Backups
from synvirt.backups.sources.guest import Sources
from synvirt.jobs.slots import Slots
from synvirt.model.values import now
from synvirt.repository import condemned, garbage, packs
from synvirt.repository.disk import PointReader
from synvirt.repository.folder import HostFolder
from synvirt.repository.keys import CHUNK_BYTES
from synvirt.repository.repository import Repository
from synvirt.repository.verify import verify_repository
from synvirt.store import Store
from tests.drawn import drawn
from tests.fakes.backups import ENDS_WITHIN_S, FakeGuests, backups_of, ended
from tests.kinds.laws import End, Place, World

HOST, GUEST = "local", "web"
OPEN = tuple(str(status) for status in Status if status not in ENDS)
# What a service knows of backups for good; other rows belong to a run that is under way.
KEPT = ("repository", "job", "run", "point")


def disk_content() -> bytes:
    return drawn(3 * CHUNK_BYTES, zeros=2 * CHUNK_BYTES, end=700)


class Runs(World):
    """`kind`: of the runs that are looked at. Subclasses ask for one, and know what it comes to."""

    kind: str
    backups: Backups
    within_s: float = ENDS_WITHIN_S

    def __init__(self, place: Place) -> None:
        self.place = place
        self.store = Store(f"sqlite:///{place.folder / 'store.db'}")
        # As each start of a service does: slots of the one before are free.
        self.store.hosts.begin(HOST, ttl_s=1000, document="{}")
        self.backups = self.service()
        self.backups.start()

    def service(self) -> Backups:
        self.guests = FakeGuests(self.place.folder / "guests")
        limits = Limits(Slots(self.store.slots, host=HOST), HOST, per_repository=2, per_host=2, per_destination=2)
        return backups_of(self.store, self.guests, self.place.folder, limits=limits, restore_host=self.restore_host())

    @property
    def content(self) -> bytes:
        return disk_content()

    def restore_host(self) -> RestoreHost | None:
        """Where its guests are restored."""
        return None

    def prepare(self) -> None:
        self.guests.image(GUEST, disk_content())
        (self.place.folder / "repository").mkdir()
        request = BackupRepositoryRequest(name="here", kind="local", path=str(self.place.folder / "repository"))
        known = self.backups.add_repository(request)
        job = self.backups.add_job(BackupJobRequest(name="nightly", vm_ids=(GUEST,), repository_id=known.id))
        self.place.outside |= {"repository": known.id, "job": job.id, "before": set[UUID]()}

    def backed_up(self) -> RestorePoint:
        """A point that was there before."""
        run = ended(self.backups, self.backups.run_job(self.place.outside["job"]).id, within_s=self.within_s)
        assert run.error is None, run.error
        self.place.outside["before"].add(run.id)
        return self.backups.points.get(run.restore_point_ids[0])

    def found(self) -> UUID | None:
        runs, _ = self.backups.runs.page(limit=100, cursor=None)
        mine = [run.id for run in runs if run.kind == self.kind and run.id not in self.place.outside["before"]]
        return mine[0] if mine else None

    def run(self, job_id: UUID) -> End:
        return str(ended(self.backups, job_id, within_s=self.within_s).status).capitalize()  # type: ignore[return-value]

    def problem(self, job_id: UUID) -> str:
        return str(self.backups.runs.get(job_id).error)

    def cancel(self, job_id: UUID) -> None:
        self.backups.runs.cancel(job_id)

    def check_undone(self, job_id: UUID) -> None:
        error = self.backups.runs.get(job_id).error
        assert error is not None
        assert error.code == "E_BAK_CANCELLED"

    def points(self) -> list[RestorePoint]:
        """All that are known; each is whole, and what its guest was; and no other is in the repository."""
        known = self.backups.points.all()
        repository = self.backups.repositories.opened(self.place.outside["repository"])
        repository.refresh()
        assert set(repository.point_ids()) == {point.id for point in known}
        assert verify_repository(repository).wrongs == ()
        for point in known:
            (disk,) = repository.manifest(point.id).shown.disks
            content = bytearray(disk.size_bytes)
            PointReader(repository, disk).read_into(0, memoryview(content))
            assert bytes(content) == self.content
        return known

    def left(self, job_id: UUID | None) -> list[str]:
        folder = self.place.folder
        left = [str(path) for name in ("exports", "journals") for path in (folder / name).rglob("*")]
        left += [str(path) for path in (folder / "repository").rglob("*") if ".partial" in path.name or ".tmp" in path.name]
        return left + rows_left(self.store)

    def die(self) -> None:
        self.backups.close()

    def close(self) -> None:
        self.backups.close()
        self.store.close()


def rows_left(store: Store) -> list[str]:
    with store._engine.connect() as db:
        rows = db.exec_driver_sql("SELECT kind, document FROM backups").all()
        ledger = db.exec_driver_sql("SELECT kind, name FROM ledger").all()
    return [f"{kind} {document}" for kind, document in rows if kind not in KEPT] + [f"{kind} {name}" for kind, name in ledger]


class Backup(Runs):
    kind = "backup"

    def submit(self) -> UUID:
        return self.backups.run_job(self.place.outside["job"]).id

    def check(self, job_id: UUID) -> None:
        run = self.backups.runs.get(job_id)
        self.backups.look()
        assert [point.id for point in self.points()] == list(run.restore_point_ids)
        assert len(run.restore_point_ids) == 1

    def check_undone(self, job_id: UUID) -> None:
        super().check_undone(job_id)
        self.backups.look()
        assert self.points() == []

    def left(self, job_id: UUID | None) -> list[str]:
        """The journal of a run that did not end is for the job's next one: it finds what is stored."""
        return [one for one in super().left(job_id) if job_id is not None or "/journals" not in one]


class BackupAgain(Backup):
    """The second run of its job, of a guest that its hypervisor or file system holds: the first has left a point, and the mark
    that this one counts changes from. `way`: what the ledger calls marks."""

    way: str
    sources: Sources

    def marks(self) -> list[str]:
        """What there is to count from, on the guest."""
        raise NotImplementedError

    def first_run(self, guest: str) -> None:
        (self.place.folder / "repository").mkdir()
        request = BackupRepositoryRequest(name="here", kind="local", path=str(self.place.folder / "repository"))
        known = self.backups.add_repository(request)
        wanted = BackupJobRequest(name="nightly", vm_ids=(guest,), repository_id=known.id, quiesce="off")
        self.place.outside |= {"repository": known.id, "job": self.backups.add_job(wanted).id, "before": set[UUID]()}
        self.backed_up()

    def check(self, job_id: UUID) -> None:
        self.backups.look()
        run = self.backups.runs.get(job_id)
        assert len(self.points()) == 2
        assert all(disk.changes_only for guest in run.guests for disk in guest.disks)
        if len(self.marks()) > 1 or list((self.place.folder / "journals").rglob("*.stored")):
            # Killed when its point was written, or about to be: which of two marks is wanted, the job's next run knows.
            assert self.backed_up().disks

    def check_undone(self, job_id: UUID) -> None:
        self.backups.look()
        assert len(self.points()) == 1

    def left(self, job_id: UUID | None) -> list[str]:
        """One mark stays, for the job's next run."""
        self.sources.close()
        with self.store._engine.connect() as db:
            states = db.exec_driver_sql(f"SELECT state FROM ledger WHERE kind = '{self.way}'").scalars().all()
        left = [one for one in super().left(job_id) if not one.startswith(f"{self.way} ")]
        left += [] if states == ["lasting"] else [f"marks {states}"]
        return left + ([] if len(self.marks()) == 1 else [f"marks of the guest: {self.marks()}"])

    def close(self) -> None:
        super().close()
        self.sources.close()


class Export(Runs):
    kind = "restore"

    def prepare(self) -> None:
        super().prepare()
        self.place.outside["point"] = self.backed_up().id

    def submit(self) -> UUID:
        return self.backups.restore(self.place.outside["point"], RestoreRequest(target="export", name="out")).id

    def check(self, job_id: UUID) -> None:
        (image,) = (self.place.folder / "exports/out").glob("*.raw")
        assert image.read_bytes() == disk_content()

    def left(self, job_id: UUID | None) -> list[str]:
        own = {str(path) for path in (self.place.folder / "exports/out").rglob("*")} if job_id is not None else set()
        own |= {str(self.place.folder / "exports/out")} if job_id is not None else set()
        return [one for one in super().left(job_id) if one not in own]


class Upkeep(Runs):
    """Of a repository that stays as it is. `did`: what this service has read, or moved, of what no other shall do again."""

    def __init__(self, place: Place) -> None:
        self.did: list[object] = []
        self.patched = pytest.MonkeyPatch()
        self.patched.setattr(upkeep, "MARK_EVERY_S", 0.0)
        super().__init__(place)

    def patch(self) -> None:
        """What is counted, and what makes a job of some megabytes one of many steps."""
        raise NotImplementedError

    def counted(self, holder: object, name: str) -> None:
        call = getattr(holder, name)

        def counting(*arguments: object, **named: object) -> object:
            self.did.append(arguments)
            return call(*arguments, **named)

        self.patched.setattr(holder, name, counting)

    def service(self) -> Backups:
        """Before it goes on with anything."""
        self.patch()
        marks = self.store.backups.all("watermarks", host=HOST)
        self.mark = json.loads(marks[0]) if marks else None
        self.goes_on = self.store.backups.all("run", host=HOST, states=OPEN) != []
        return super().service()

    def prepare(self) -> None:
        super().prepare()
        self.place.outside["point"] = self.backed_up().id

    def check_not_again(self) -> None:
        assert len(self.did) == (self.left_to_do() if self.goes_on else 0)

    def left_to_do(self) -> int:
        """As the services before have said."""
        raise NotImplementedError

    def check(self, job_id: UUID) -> None:
        (point,) = self.points()
        assert (point.state, point.verified_at is not None) == ("ok", True)

    def check_undone(self, job_id: UUID) -> None:
        super().check_undone(job_id)
        assert len(self.points()) == 1

    def close(self) -> None:
        super().close()
        self.patched.undo()


class OfPoint(Upkeep):
    kind = "verify"
    # Of its disk, without zeros.
    CHUNKS = 4

    def patch(self) -> None:
        self.counted(Repository, "read_chunk")

    def submit(self) -> UUID:
        return self.backups.verify(self.place.outside["point"]).id

    def left_to_do(self) -> int:
        return self.CHUNKS - (self.mark["chunks"] if self.mark else 0)


class OfRepository(Upkeep):
    kind = "verify"

    def patch(self) -> None:
        self.patched.setattr(packs, "PACK_BYTES", CHUNK_BYTES)
        self.counted(packs, "check_whole")

    def submit(self) -> UUID:
        return self.backups.verify_repository(self.place.outside["repository"]).id

    def left_to_do(self) -> int:
        there = len(self.backups.repositories.opened(self.place.outside["repository"]).pack_sizes())
        return there - (self.mark["packs"] if self.mark else 0)


class Collection(Upkeep):
    """Four points were removed long ago. What the first had alone is condemned; what the second had is about to be; of what the
    others had a chunk each is still needed, and moved."""

    kind = "collect"
    MOVED = 2

    def patch(self) -> None:
        self.patched.setattr(garbage, "MOVED_AT_ONCE", 1)
        if "garbage" in self.place.outside:
            self._of_small_packs()

    def _of_small_packs(self) -> None:
        self.patched.setattr(packs, "PACK_BYTES", CHUNK_BYTES)
        self.counted(packs.Pack, "add")

    def prepare(self) -> None:
        Runs.prepare(self)
        shared = [self._made(disk_content()[at * CHUNK_BYTES :][:CHUNK_BYTES] + _noise(10 + at)) for at in range(self.MOVED)]
        self.guests.image(GUEST, disk_content())
        self.place.outside["point"] = self.backed_up().id
        known, alone = self._made(_noise(1)), self._made(_noise(2))
        self.guests.image(GUEST, disk_content())
        repository, moment = self.backups.repositories.opened(self.place.outside["repository"]), now().timestamp()
        self._removed(*known)
        assert garbage.collect(repository, now=moment).packs_condemned
        for listed in (self.place.folder / "repository" / condemned.FOLDER).iterdir():
            os.utime(listed, (moment - 2 * garbage.GRACE_S,) * 2)
        for one in (alone, *shared):
            self._removed(*one)
        self.place.outside |= {"condemned": known[1], "garbage": alone[1].union(*(made for _, made in shared))}
        self.place.outside["dry_run"] = garbage.collect(repository, now=moment, dry_run=True)
        self._of_small_packs()

    def _made(self, content: bytes) -> tuple[UUID, set[str]]:
        """A point, and the packs that it brought."""
        repository = self.backups.repositories.opened(self.place.outside["repository"])
        before = repository.pack_sizes().keys()
        self.guests.image(GUEST, content)
        point = self.backed_up().id
        repository.refresh()
        return point, set(repository.pack_sizes().keys() - before)

    def _removed(self, point: UUID, made: set[str]) -> None:
        self.backups.remove_point(point)
        for pack in made:
            os.utime(self.place.folder / "repository/packs" / pack, (1, 1))

    def steps(self) -> Sequence[tuple[object, str]]:
        return [(HostFolder, "write"), (HostFolder, "delete")]

    def submit(self) -> UUID:
        return self.backups.collect(self.place.outside["repository"], dry_run=False).id

    def remember(self) -> None:
        self.place.outside["did"] = len(self.did)

    def check_not_again(self) -> None:
        """But for what was in memory."""
        assert self.place.outside["did"] + len(self.did) <= self.MOVED + 1

    def check(self, job_id: UUID) -> None:
        assert len(self.points()) == 1
        repository = self.backups.repositories.opened(self.place.outside["repository"])
        there, collected, dry_run = (
            set(repository.pack_sizes()),
            self.backups.runs.get(job_id).collected,
            self.place.outside["dry_run"],
        )
        assert there.isdisjoint(self.place.outside["condemned"])
        assert there >= self.place.outside["garbage"], "it is condemned now, and deleted a day later"
        assert self.place.outside["garbage"] <= condemned.packs_of(repository.folder)
        assert collected is not None
        # What was moved is counted with the pack that it was moved out of, which is condemned a moment later.
        assert collected.model_copy(update={"bytes_moved": dry_run.bytes_moved}) == dry_run


def _noise(seed: int) -> bytes:
    return random.Random(seed).randbytes(2 * CHUNK_BYTES)
