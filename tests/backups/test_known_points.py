"""The restore points that a host knows: several threads change one at the same time."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from synvirt.errors import BackupNotFound
from tests.backups.house import House, disk_content


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
