"""The restore points that a host knows: several threads change one at the same time."""

import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import pytest

from synvirt.backups.model import BackupRepositoryChange, BackupRepositoryRequest, BootTest, RestorePoint
from synvirt.backups.points import Points
from synvirt.backups.restores.boot_test import BootTesting
from synvirt.errors import BackupConflict, BackupNotFound
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


def _twice(house: House, name: str) -> tuple[UUID, str]:
    """A repository with a point of a guest, and its recovery key; a symlink leads to its folder too."""
    house.image("web", disk_content())
    first = house.repository()
    house.run(job := house.job("web", repository=first))
    house.backups.remove_job(job.id)
    (house.folder / name).symlink_to(house.folder / "repository")
    return first, house.backups.repositories.recovery_key(first)


def _asked(house: House, name: str, key: str) -> BackupRepositoryRequest:
    return BackupRepositoryRequest(name=name, kind="local", path=str(house.folder / name), recovery_key=key)


def test_a_repository_is_known_once_by_whatever_name(tmp_path: Path) -> None:
    """Its points would be shown under one of the names alone, and go with that one."""
    house = House(tmp_path)
    first, key = _twice(house, "symlink")
    with pytest.raises(BackupConflict, match="known as here already"):
        house.backups.add_repository(_asked(house, "symlink", key))
    assert [one.id for one in house.backups.repositories.known()] == [first]
    house.backups.forget_repository(first)
    again = house.backups.add_repository(_asked(house, "symlink", key))
    assert [point.repository_id for point in house.backups.points.all()] == [again.id]
    house.close()


def test_what_others_have_made_is_known_once_the_place_is_named_again(tmp_path: Path) -> None:
    """A host that shares the repository is lost, or the store was put back from an older copy."""
    house = House(tmp_path)
    house.image("web", disk_content())
    job = house.job("web")
    (first,) = house.run(job).restore_point_ids
    (second,) = house.run(job).restore_point_ids
    (third,) = house.run(job).restore_point_ids
    for made in (second, third):
        house.backups.points.forget(made)
    place = str(tmp_path / "repository")
    house.backups.change_repository(job.repository_id, BackupRepositoryChange(name="renamed"))
    assert house.backups.points.ids() == {first}
    house.backups.change_repository(job.repository_id, BackupRepositoryChange(path=place))
    assert [point.id for point in house.backups.points.all()] == [first, second, third]
    assert {fate.restore_point_id for fate in house.backups.retiring.planned(job)} == {first, second, third}
    house.close()


def test_of_a_repository_that_an_earlier_version_knows_twice_one_name_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = House(tmp_path)
    first, key = _twice(house, "symlink")
    with monkeypatch.context() as patched:
        patched.setattr(house.backups.repositories, "_stored_id", lambda _: None)
        second = house.backups.add_repository(_asked(house, "symlink", key))
    (tmp_path / "away").mkdir()
    away = house.backups.add_repository(BackupRepositoryRequest(name="away", kind="local", path=str(tmp_path / "away")))
    (tmp_path / "away").rename(tmp_path / "gone")
    assert [point.repository_id for point in house.backups.points.all()] == [first]
    house.backups.forget_repository(first)
    assert [point.repository_id for point in house.backups.points.all()] == [second.id]
    house.backups.forget_repository(away.id)
    house.close()
