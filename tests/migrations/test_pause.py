"""A host that loses its lease, or whose store is older by now, ends what its jobs have begun, also in threads."""

import random
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from synvirt.errors import Cancelled
from synvirt.guests import OnMessage
from synvirt.migrations import engine as engine_module
from synvirt.migrations.engine import Engine
from synvirt.model.job import Migration
from synvirt.model.kinds import State
from synvirt.model.machine import VmManifest
from synvirt.sizes import MIB
from synvirt.store import Wish
from synvirt.store.store import StoreAway
from tests.fakes.guests import FakePreparer
from tests.fakes.workers import in_process
from tests.house import VM, House, live_plan, offline_plan
from tests.migrations.patience.waiting import at_commits
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


@pytest.mark.parametrize("older", [State.COPYING_FULL, State.DELTA_SYNCING])
def test_a_job_that_sleeps_goes_on_from_a_store_that_is_older_by_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, older: State
) -> None:
    """As when another PostgreSQL takes over, without the last seconds: until its next delta, an hour later, the job was shown
    where it had been before, and its wave did not cut it over in its window."""
    monkeypatch.setattr(engine_module, "WISHES_POLL_S", 0.05)
    house = House(tmp_path, workers=in_process)
    house.platform.add_vm(VM, {"disk-0": random.Random(1).randbytes(MIB)})
    engine, kept, away = Engine(house.rooms, host="local"), list[sqlite3.Connection](), threading.Event()
    job = house.intake.submit(live_plan(warm={"cutover": "manual", "interval_s": 3600}))
    wishes = house.store.wishes

    def wishes_or_away(**of: str) -> list[Wish]:
        if away.is_set():
            raise StoreAway("the connection is lost")
        return wishes(**of)

    def looked(now: Migration) -> bool:
        if now.state is older:
            kept.append(sqlite3.connect(":memory:", check_same_thread=False))
            with closing(sqlite3.connect(tmp_path / "store.db")) as store:
                store.backup(kept[0])
        return bool(kept)

    def finished() -> int:
        return sum(one.finished_at is not None for one in house.store.get(job.id).passes)

    monkeypatch.setattr(house.store, "wishes", wishes_or_away)
    at_commits(house, job, looked)
    engine.start()
    until(lambda: finished() == 2)
    away.set()
    with closing(sqlite3.connect(tmp_path / "store.db")) as store, closing(kept[0]) as before:
        before.backup(store)
    assert (house.store.get(job.id).state, finished() < 2) == (older, True)
    time.sleep(0.3)  # for a look while it is away
    away.clear()
    until(lambda: finished() == 2)
    house.intake.cutover(job.id)
    engine.wake(job.id)
    until(lambda: house.store.get(job.id).ended)
    ended = house.store.get(job.id)
    assert ended.state is State.COMPLETED
    assert house.volume(ended).read_bytes() == house.platform.disk_path(VM, "disk-0").read_bytes()
    assert house.platform.vm(VM)["snapshots"] == {}
    engine.close()
    house.close()
