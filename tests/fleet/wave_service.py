"""A service that carries out waves, without its API: engine, taking over and scheduler over a house of fakes, in a process of
its own that a test can kill. It reaches the platform and both destinations, as the other hosts do.

python -m tests.fleet.wave_service FOLDER STORE_URL

HOST, LEASE_S, SHARED: see tests.migrations.engine_process. In SHARED, `later` has by how many seconds the scheduler's clock is
ahead, and `ill` a file of each program that fails in the guests. A guest's ports are this machine's.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from uuid import UUID

from synvirt.fleet.carrying import Carrying, carried
from synvirt.fleet.changing import failed
from synvirt.fleet.host_side import HostSide
from synvirt.fleet.placing import Placing
from synvirt.hypervisor import Volume
from synvirt.live import VmRow
from synvirt.migrations.engine import Engine
from synvirt.migrations.hosts.about import host_of
from synvirt.model.job import Domain
from synvirt.model.values import now
from synvirt.outgoing import Guard
from synvirt.proof.health import Checker
from synvirt.sizes import MIB
from tests.fakes.hypervisor import FakeDomain, FakeHypervisor
from tests.house import House, SharedDirectory
from tests.migrations.engine_process import serve

SECOND = "second"


class KeptHypervisor(FakeHypervisor):
    """Its domains outlive the service, as real ones do. `boots`: who was seen booted, and when."""

    def __init__(self, folder: Path, ill: Path) -> None:
        super().__init__()
        self._file, self._boots, self._ill = folder / "domains.json", folder / "boots", ill
        if self._file.exists():
            for document, running in json.loads(self._file.read_text()):
                domain = Domain.model_validate(document)
                self.domains[UUID(domain.uuid)] = FakeDomain(domain, running)

    def _keep(self) -> None:
        # Several jobs define and start guests at once; each would rename the file that another has renamed already.
        with self._lock:
            kept = [[one.domain.model_dump(mode="json"), one.running] for one in self.domains.values()]
            new = self._file.with_suffix(".new")
            new.write_text(json.dumps(kept))
            new.rename(self._file)

    def define(self, domain: Domain, moved: Sequence[Volume] = ()) -> None:
        super().define(domain, moved)
        self._keep()

    def start(self, uuid: UUID) -> None:
        super().start(uuid)
        self._keep()

    def undefine(self, uuid: UUID, job_id: UUID) -> None:
        super().undefine(uuid, job_id)
        self._keep()

    def wait_until_booted(self, uuid: UUID, timeout_s: float, stop: Callable[[], bool]) -> str:
        sign = super().wait_until_booted(uuid, timeout_s, stop)
        with self._boots.open("a") as boots:
            boots.write(f"{self.domains[uuid].domain.name} {time.time()}\n")
        return sign

    def addresses(self, uuid: UUID) -> list[str]:
        return ["127.0.0.1"]

    def run_in_guest(self, uuid: UUID, argv: tuple[str, ...], timeout_s: float) -> int:
        return int((self._ill / argv[0]).exists())


def house_of(folder: Path, url: str, host: str, shared: Path) -> House:
    """What a host of this fleet has; the test that watches has one too."""
    folder.mkdir(exist_ok=True)
    (shared / "ill").mkdir(parents=True, exist_ok=True)
    return House(
        folder,
        store_url=url,
        host=host,
        shared=shared,
        hypervisor=KeptHypervisor(folder, shared / "ill"),
        others={SECOND: SharedDirectory(shared / "second")},
    )


@contextmanager
def scheduling(house: House, shared: Path, engine: Engine) -> Iterator[Carrying]:
    house.intake._begin, house.intake._wake = engine.begin, engine.wake
    checker = Checker(house.hypervisor, Guard(("127.0.0.0/8",)))
    side = HostSide(house.rooms, checker, cancel=house.intake.cancel, failed=partial(failed, house.store.waves))

    def clock() -> datetime:
        later = shared / "later"
        return now() + timedelta(seconds=float(later.read_text()) if later.exists() else 0)

    def vm_of(_source_id: UUID, vm_id: str) -> VmRow:
        return VmRow(vm_id, vm_id, "on", cpu_count=1, memory_bytes=512 * MIB, capacity_bytes=4 * MIB)

    placing = Placing(house.store.waves, lambda: [host_of(row, 0) for row in house.store.hosts.all()], vm_of)
    carrying = Carrying(house.intake, side, placing, vm_of=vm_of, clock=clock)
    try:
        with carried(carrying, every_s=0.2):
            yield carrying
    finally:
        side.close()


if __name__ == "__main__":
    reached = Path(os.environ["SHARED"])
    made = house_of(Path(sys.argv[1]), sys.argv[2], os.environ["HOST"], reached)
    serve(made, beside=partial(scheduling, made, reached))
