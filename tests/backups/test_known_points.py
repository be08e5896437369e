"""The restore points that a host knows: several threads change one at the same time."""

import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import pytest

from synvirt.backups.model import BootTest, RestorePoint
from synvirt.backups.points import Points
from synvirt.backups.restores.boot_test import BootTesting
from synvirt.errors import BackupNotFound
from synvirt.model.values import now
from synvirt.store.documents import readable
from tests.backups.house import House, disk_content


def test_a_run_reads_the_points_of_its_own_guests_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repository has those of years and of all guests: to parse them all takes seconds, for each guest of each run."""
    house = House(tmp_path)
    house.image("web", disk_content())
    job = house.job("web")
    (point_id,) = house.run(job).restore_point_ids
    points = house.backups.points
    point = points.get(point_id)
    others: list[dict[str, Any]] = [{"job_id": uuid4()}, {"vm_id": str(uuid4())}, {"repository_id": uuid4()}]
    for other in others * 20:
        points.put(point.model_copy(update={"id": uuid4(), "run_id": uuid4(), **other}))
    parsed: list[UUID] = []

    def counted(model: type[RestorePoint], texts: Iterable[str]) -> list[RestorePoint]:
        found = readable(model, texts)
        parsed.extend(one.id for one in found)
        return found

    monkeypatch.setattr("synvirt.backups.points.readable", counted)
    house.run(job)
    assert set(parsed) - {point_id} <= {one.id for one in points.all({"job_id": [str(job.id)], "vm_id": [point.vm_id]})}
    house.close()


def test_changes_of_a_point_at_the_same_time_lose_nothing_and_bring_back_none(tmp_path: Path) -> None:
    house = House(tmp_path)
    house.image("web", disk_content())
    (point_id,) = house.run(house.job("web")).restore_point_ids
    points = house.backups.points
    fields = {"state": "damaged", "protected": True, "vm_name": "other", "stored_bytes": 7}
    together = threading.Barrier(len(fields))

    def change(field: str) -> None:
        together.wait()
        points.change(point_id, **{field: fields[field]})

    with ThreadPoolExecutor(len(fields)) as pool:
        list(pool.map(change, fields))
    assert {field: getattr(points.get(point_id), field) for field in fields} == fields
    points.forget(point_id)
    with pytest.raises(BackupNotFound):
        points.change(point_id, state="ok")
    assert points.all() == []
    house.close()


def test_the_result_of_a_boot_test_takes_back_nothing_that_others_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A verification finds damage, and somebody protects the point, just when the test ends."""
    house = House(tmp_path)
    house.image("web", disk_content())
    (point_id,) = house.run(house.job("web")).restore_point_ids
    points, known = house.backups.points, Points.get
    point, others = points.get(point_id), [{"state": "damaged", "protected": True}]

    def overtaken(self: Points, id_: UUID) -> RestorePoint:
        found = known(self, id_)
        while others:
            self.change(id_, **others.pop())
        return found

    monkeypatch.setattr(Points, "get", overtaken)
    result = BootTest(at=now(), result="booted", seconds=1)
    ledger: Any = SimpleNamespace(sweep=lambda run_id, away_s: True)
    memory: Any = SimpleNamespace(mark=lambda run_id, model: result)
    under_way: Any = SimpleNamespace(run=SimpleNamespace(id=uuid4()))
    nothing: Any = None
    BootTesting(nothing, points, nothing, nothing, ledger=ledger, memory=memory).test(under_way, point)
    points.get(point_id)  # where it was not read before, they write now
    found = known(points, point_id)
    assert (found.state, found.protected) == ("damaged", True)
    assert found.boot_test is not None
    house.close()
