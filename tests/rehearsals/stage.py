"""Where rehearsals are tested: a house of fakes with a job that syncs on, a guest that writes, and networks."""

import contextlib
import random
import threading
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar
from uuid import UUID

from synvirt.destinations.directory import DirectoryDestination
from synvirt.errors import SourceUnreachable
from synvirt.model.job import Migration
from synvirt.model.kinds import State
from synvirt.model.machine import Nic
from synvirt.model.rehearsal import (
    REHEARSED,
    AnyCheck,
    Rehearsal,
    RehearsalRequest,
)
from synvirt.rehearsals.asking import Rehearsing
from synvirt.rehearsals.engine import Rehearsals
from synvirt.sizes import KIB
from tests.fakes.clones import CopyingDirectory
from tests.fakes.guests import overlay_read, overlay_write
from tests.fakes.hypervisor import FakeHypervisor
from tests.fakes.workers import in_process
from tests.house import VM, Crash, House, live_plan

DISK = "disk-0"
CONTENT = random.Random(5).randbytes(700 * KIB) + bytes(200 * KIB)
HELD = {"cutover": "manual", "interval_s": 0.2}


WRITTEN = b"the guest was here"


class Writing(FakeHypervisor):
    """A guest that writes to its disk as soon as it runs. `seen`: what its disk was when it was started, by its UUID; `last`:
    what the disk of one on an overlay was when it was removed."""

    def __init__(self, **fields: object) -> None:
        super().__init__(**fields)  # type: ignore[arg-type]
        self.seen: dict[UUID, bytes] = {}
        self.last: dict[UUID, bytes] = {}

    def start(self, uuid: UUID) -> None:
        super().start(uuid)
        path, is_overlay = self._disk(uuid)
        if is_overlay:
            self.seen[uuid] = overlay_read(path)
            overlay_write(path, WRITTEN)
            return
        self.seen[uuid] = path.read_bytes()
        with path.open("r+b") as disk:
            disk.write(WRITTEN)

    def undefine(self, uuid: UUID, job_id: UUID) -> None:
        if uuid in self.domains and uuid in self.seen:
            path, is_overlay = self._disk(uuid)
            if is_overlay:
                self.last[uuid] = overlay_read(path)
        super().undefine(uuid, job_id)

    def _disk(self, uuid: UUID) -> tuple[Path, bool]:
        """The disk's file, and whether it is an overlay, over what its domain says."""
        disk = ET.fromstring(self.domains[uuid].domain.xml).find("devices/disk")
        assert disk is not None
        source, driver, under = disk.find("source"), disk.find("driver"), disk.find("backingStore/source")
        assert source is not None
        assert driver is not None
        assert (driver.get("type") == "qcow2") is (under is not None)
        return Path(source.get("file", "")), under is not None


class FakeNetwork:
    """Of guests without a stack. `open`: those that were not closed. `ended`: whether its process was killed."""

    open: ClassVar[list["FakeNetwork"]] = []
    ended = False

    def __init__(self, cards: Sequence[Nic]) -> None:
        self.ports = tuple(range(9, 9 + len(cards)))
        self.open.append(self)

    def addresses(self) -> list[str]:
        return []

    def connect(self, port: int, timeout_s: float) -> Any:
        raise SourceUnreachable("there is nobody")

    def close(self) -> None:
        if self in self.open:
            self.open.remove(self)


class Stage:
    """A house, its rehearsals, and a job that holds and syncs on, each in a thread, as the service has them. `open`: those that
    were not closed; jobs of a test that has failed must not run into the next."""

    open: ClassVar[list["Stage"]] = []

    def __init__(
        self,
        folder: Path,
        hypervisor: FakeHypervisor,
        *,
        conversion: str = "auto",
        begin_network: Any = None,
        destination: type[DirectoryDestination] = CopyingDirectory,
    ) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "volumes").mkdir(exist_ok=True)
        self.house = House(folder, hypervisor=hypervisor, workers=in_process, destination=destination(folder / "volumes"))
        self.disks_say: list[dict[str, str]] = []
        rooms = replace(self.house.rooms, look_inside=lambda *_: self.disks_say.pop(0) if self.disks_say else {})
        self.house.rooms = rooms
        self.rehearsals = Rehearsals(rooms, None, folder / "rehearsals", begin_network=begin_network)
        self.asking = Rehearsing(
            rooms.store, self.rehearsals, host=rooms.host, destination_named=rooms.destination_named, wake=self.house.wake
        )
        # The runner is not started: a test runs a rehearsal itself, in a thread.
        self._threads: list[threading.Thread] = []
        self.died: list[BaseException] = []
        self.let_go = threading.Event()
        self._conversion = conversion
        self.open.append(self)

    def submit(self) -> Migration:
        self.house.platform.add_vm(VM, {DISK: CONTENT})
        return self.house.intake.submit(live_plan(warm=HELD, conversion=self._conversion))

    def begin_job(self, job_id: UUID) -> None:
        self._begin(lambda: self.house.run(job_id))

    def begin(self, rehearsal_id: UUID) -> threading.Thread:
        """The thread that ends with it."""
        return self._begin(lambda: self.rehearsals.run(rehearsal_id, self.let_go))

    def _begin(self, run: Callable[[], object]) -> threading.Thread:
        def noted() -> None:
            try:
                run()
            except BaseException as error:
                self.died.append(error)

        thread = threading.Thread(target=noted, daemon=True)
        thread.start()
        self._threads.append(thread)
        return thread

    def join(self) -> None:
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()
        self._threads.clear()

    def until(self, happened: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not happened():
            assert time.monotonic() < deadline, "it does not happen"
            assert not self.died, self.died
            time.sleep(0.01)

    def holds(self, job_id: UUID) -> None:
        self.until(lambda: self.house.store.get(job_id).state is State.DELTA_SYNCING)

    def rehearse(self, job_id: UUID, *checks: AnyCheck) -> Rehearsal:
        """To its end."""
        rehearsal = self.asking.ask(job_id, RehearsalRequest(checks=checks))
        self.begin(rehearsal.id)
        self.until(lambda: self.asking.get(job_id, rehearsal.id).state in REHEARSED)
        return self.asking.get(job_id, rehearsal.id)

    def cut_over(self, job_id: UUID) -> Migration:
        self.house.intake.cutover(job_id)
        self.join()
        return self.house.store.get(job_id)

    def cancel(self, job_id: UUID) -> Migration:
        self.house.intake.cancel(job_id)
        self.join()
        return self.house.store.get(job_id)

    def close(self) -> None:
        """As a service that ends, whatever the test has come to."""
        self.house.store.on_commit = lambda: None
        with contextlib.suppress(Crash):
            for job in self.house.store.unended():
                self.house.store.request_cancel(job.id)
                self.house.wake(job.id)
        self.die()

    def die(self) -> None:
        """As a service that was killed: its jobs are as they are."""
        if self in self.open:
            self.open.remove(self)
        self.join()
        self.rehearsals.close()
        self.house.close()

    def leftovers(self, job: Migration) -> list[str]:
        """Of rehearsals: what is there and not the job's own. What its passes wrote beside a volume is."""
        own = {str(self.house.volume(job)) for disk in job.disks if disk.volume}
        for volume in [Path(one) for one in own]:
            # A pass that begins just now makes both; at the end of the job all are gone.
            beside = ("aside", "marks", "aside.partial", "marks.partial")
            own |= {str(volume.with_name(f".{volume.name}.{kept}")) for kept in beside}
        own |= {f"domain {job.domain.uuid}"} if job.domain else set()
        left = [one for one in self.house.leftovers() if one not in own and "receipts" not in one]
        return [one for one in left if not Path(one).is_dir() or Path(one).parent.name == "conversions"]


def source_bytes(stage: Stage) -> bytes:
    return stage.house.platform.disk_path(VM, DISK).read_bytes()
