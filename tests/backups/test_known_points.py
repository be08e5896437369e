"""The restore points that a host knows: several threads change one at the same time."""

import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest

from synvirt.backups.model import RestorePoint
from synvirt.errors import BackupNotFound
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
