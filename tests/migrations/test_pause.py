"""A host that loses its lease ends what its jobs have begun, also in threads."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from synvirt.errors import Cancelled
from synvirt.guests import OnMessage
from synvirt.migrations.engine import Engine
from synvirt.model.kinds import State
from synvirt.model.machine import VmManifest
from tests.fakes.guests import FakePreparer
from tests.fakes.workers import in_process
from tests.house import House, offline_plan
from tests.running.processes import until


class FirstHangs(FakePreparer):
    """Its first conversion ends by the stop alone."""

    def __init__(self) -> None:
        super().__init__()
        self.began, self.at_once, self.under_way = threading.Event(), 0, 0

    def wants(self, manifest: VmManifest) -> bool:
        return True

    def convert(
        self,
        name: str,
        manifest: VmManifest,
        devices: list[str],
        on_message: OnMessage,
        stop: Callable[[], bool],
        **more: Any,
    ) -> None:
        is_first = not self.began.is_set()
        self.under_way += 1
        self.at_once = max(self.at_once, self.under_way)
        self.began.set()
        try:
            if is_first:
                until(stop, 60)
                raise Cancelled
            super().convert(name, manifest, devices, on_message, stop, **more)
        finally:
            self.under_way -= 1


def test_a_conversion_ends_with_the_lease_and_is_done_again(tmp_path: Path) -> None:
    """The tool ran on: the job's next run ended it while it made the same overlays, or was ended by it."""
    preparer = FirstHangs()
    house = House(tmp_path, workers=in_process, preparer=preparer)
    (house.imports / "appliance").mkdir()
    (house.imports / "appliance" / "disk-0.raw").write_bytes(bytes(4096))
    engine = Engine(house.rooms, host="local")
    job = house.intake.submit(offline_plan(house.imports / "appliance"))
    engine.start()
    assert preparer.began.wait(60)
    engine.pause()
    until(lambda: preparer.under_way == 0)
    engine.resume()
    until(lambda: house.store.get(job.id).ended)
    engine.close()
    assert (house.store.get(job.id).state, preparer.at_once) == (State.COMPLETED, 1)
    house.close()
