"""Which restore points stay, and why; and what never goes."""

from collections.abc import Iterable
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID, uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synvirt.accounts import Role
from synvirt.acting import Act, acting
from synvirt.backups.backing_up import trusted
from synvirt.backups.model import BackupJob, BackupJobChange, PointFate, RestorePoint
from synvirt.backups.retention import Retention, kept
from synvirt.backups.retiring import Retiring, fates
from synvirt.errors import BackupForbidden
from synvirt.model.values import now
from synvirt.repository.keys import CHUNK_BYTES
from synvirt.repository.manifest import Mark
from tests.backups.house import House, disk_content

NEW_YEAR = datetime(2026, 1, 1, 12, tzinfo=UTC)


def _every(step: timedelta, count: int) -> list[tuple[UUID, datetime]]:
    return [(uuid4(), NEW_YEAR + number * step) for number in range(count)]


def test_the_last_of_each_period_is_kept() -> None:
    points = _every(timedelta(days=1), 400)
    found = kept(points, Retention(keep_last=2, keep_daily=3, keep_weekly=2, keep_monthly=2, keep_yearly=5))
    days = sorted((at.date().isoformat(), found[id_]) for id_, at in points if id_ in found)
    assert days == [
        ("2026-12-31", ["keep_yearly"]),
        ("2027-01-31", ["keep_weekly", "keep_monthly"]),
        ("2027-02-02", ["keep_daily"]),
        ("2027-02-03", ["keep_last", "keep_daily"]),
        ("2027-02-04", ["keep_last", "keep_daily", "keep_weekly", "keep_monthly", "keep_yearly"]),
    ]


def test_the_last_of_each_hour_is_kept() -> None:
    points = _every(timedelta(minutes=20), 12)
    found = kept(points, Retention(keep_hourly=3))
    assert [at.strftime("%H:%M") for id_, at in points if id_ in found] == ["13:40", "14:40", "15:40"]


def test_retention_that_says_nothing_keeps_all_and_never_removes_the_newest() -> None:
    points = _every(timedelta(days=1), 5)
    assert set(kept(points, Retention())) == {id_ for id_, _ in points}
    assert kept(points, Retention(keep_last=0)) == {points[-1][0]: ["newest"]}
    assert kept([], Retention(keep_last=1)) == {}


def _point(guest: str, at: datetime, *, damaged: bool = False) -> RestorePoint:
    return RestorePoint(
        id=uuid4(),
        vm_id=guest,
        vm_name=guest,
        job_id=UUID(int=1),
        run_id=uuid4(),
        created_at=at,
        quiesced=False,
        consistency="crash",
        repository_id=UUID(int=2),
        repository_kind="local",
        disks=(),
        size_bytes=0,
        stored_bytes=0,
        state="damaged" if damaged else "unverified",
    )


def _of(points: Iterable[RestorePoint], found: list[PointFate]) -> list[tuple[str, ...]]:
    by_id = {fate.restore_point_id: fate.kept_by for fate in found}
    return [by_id[point.id] for point in points]


def test_a_damaged_point_takes_no_good_ones_place() -> None:
    points = [_point("web", NEW_YEAR + timedelta(days=day), damaged=day > 1) for day in range(4)]
    found = fates(points, Retention(keep_last=1))
    assert _of(points, found) == [(), ("keep_last",), (), ("keep_last",)]


def test_a_point_of_a_clock_that_was_ahead_takes_no_other_ones_place() -> None:
    points = [_point("web", NEW_YEAR + timedelta(days=day), damaged=day == 3) for day in (0, 1, 2, 3, 400, 401)]
    found = fates(points, Retention(keep_last=1), moment=NEW_YEAR + timedelta(days=5))
    assert _of(points, found) == [(), (), ("keep_last",), (), (), ("keep_last",)]
    found = fates(points, Retention(keep_last=1), moment=NEW_YEAR + timedelta(days=500))
    assert _of(points, found) == [(), (), (), (), (), ("keep_last",)], "its time has come"


def test_a_protected_point_stays_and_says_why() -> None:
    points = [_point("web", NEW_YEAR + timedelta(days=day)) for day in range(3)]
    found = fates(points, Retention(keep_last=1), protected={points[0].id})
    assert _of(points, found) == [("protected",), (), ("keep_last",)]


def test_guests_are_counted_apart() -> None:
    points = [_point(guest, NEW_YEAR + timedelta(hours=hour)) for hour in range(3) for guest in ("web", "db")]
    found = fates(points, Retention(keep_last=1))
    assert {fate.vm_id for fate in found if not fate.removed} == {"web", "db"}
    assert sum(not fate.removed for fate in found) == 2


counts = st.none() | st.integers(0, 5)
histories = st.lists(st.tuples(st.integers(0, 2000), st.booleans(), st.sampled_from("ab")), max_size=30)


@given(histories, st.builds(Retention, **dict.fromkeys(Retention.model_fields, counts)))
def test_the_newest_good_point_of_each_guest_never_goes(history: list[tuple[int, bool, str]], retention: Retention) -> None:
    points = [_point(guest, NEW_YEAR + timedelta(hours=hour), damaged=damaged) for hour, damaged, guest in history]
    found = fates(points, retention)
    assert {fate.restore_point_id for fate in found} == {point.id for point in points}
    assert [fate.removed for fate in found] == [not fate.kept_by for fate in found]
    staying = {fate.restore_point_id for fate in found if not fate.removed}
    for guest in "ab":
        good = [point for point in points if point.vm_id == guest and point.state != "damaged"]
        if good:
            newest = max(point.created_at for point in good)
            assert staying & {point.id for point in good if point.created_at == newest}
        if wanted := retention.keep_last:
            assert len(staying & {point.id for point in good}) >= min(wanted, len(good))


def _job(retention: Retention) -> BackupJob:
    return BackupJob(
        id=UUID(int=1),
        name="nightly",
        vm_ids=("web",),
        repository_id=UUID(int=2),
        quiesce="off",
        retention=retention,
        created_at=NEW_YEAR,
    )


def test_a_job_removes_its_own_points_in_its_own_repository_and_none_that_is_read_or_kept() -> None:
    old, read, kept_one, newest = (_point("web", NEW_YEAR + timedelta(days=day)) for day in range(4))
    foreign = [old.model_copy(update={"id": uuid4(), **one}) for one in ({"job_id": uuid4()}, {"repository_id": uuid4()})]
    removed: list[UUID] = []
    mine = [old, read, kept_one, newest]
    repository = SimpleNamespace(kept_ids=lambda: {kept_one.id}, point_ids=lambda: [one.id for one in mine])
    repositories = SimpleNamespace(opened=lambda _: repository)
    points = SimpleNamespace(
        all=lambda only: [
            one for one in [*foreign, *mine] if all(str(getattr(one, name)) in values for name, values in only.items())
        ]
    )
    retiring = Retiring(cast("Any", repositories), cast("Any", points), removed.append, in_use=lambda: {read.id})
    retiring.retire(_job(Retention(keep_last=1)), vm_id="mail")
    assert removed == []
    retiring.retire(_job(Retention(keep_last=1)), vm_id="web")
    assert removed == [old.id]


def test_nothing_is_taken_unread_from_a_point_that_may_share_what_was_damaged() -> None:
    job = _job(Retention())
    first, second, third = (_point("web", NEW_YEAR + timedelta(days=day)) for day in (0, 1, 4))
    other = _point("mail", NEW_YEAR, damaged=True).model_copy(update={"verified_at": NEW_YEAR + timedelta(days=2)})
    looked_at = first.model_copy(update={"verified_at": NEW_YEAR + timedelta(days=3), "state": "ok"})
    assert trusted([first, second], job, "web") == [second, first]
    assert trusted([first, second, other], job, "web") == []
    assert trusted([looked_at, second, third, other], job, "web") == [third, looked_at]
    assert trusted([second.model_copy(update={"repository_id": UUID(int=3)})], job, "web") == []
    for foreign in ({"job_id": uuid4()}, {"vm_id": "mail"}):
        assert trusted([second.model_copy(update=foreign)], job, "web") == []


def test_retention_removes_old_points_and_keeps_the_newest(house: House) -> None:
    house.image("web", disk_content())
    job = house.job("web", retention=Retention(keep_last=2))
    points: list[UUID] = []
    for number in range(4):
        house.image("web", bytes([number + 1]) * CHUNK_BYTES)
        points += house.run(job).restore_point_ids
    assert [point.id for point in house.backups.points.page(limit=9, cursor=None)[0]] == [points[3], points[2]]
    assert house.ended(house.backups.verify(points[2])).status == "completed"


def test_a_run_does_not_remove_its_own_point_after_a_clock_that_was_ahead(house: House) -> None:
    """It ended completed, without a point, until the wrong time had come; and changes were counted from the wrong one."""
    house.image("web", disk_content())
    house.guests.mark = Mark(kind="checkpoint", name="synvirt-1-1")
    job = house.job("web", retention=Retention(keep_last=2))
    for _ in range(2):
        (ahead,) = house.run(job).restore_point_ids
        house.backups.points.change(ahead, created_at=now() + timedelta(days=365))
    (made,) = house.run(job).restore_point_ids
    assert made in house.backups.points.ids()
    assert house.ended(house.backups.verify(made)).status == "completed"
    house.run(job)
    assert house.guests.bases[-1] == made


def test_a_point_that_is_gone_from_the_repository_takes_no_other_ones_place(house: House) -> None:
    """Another host has removed it, or somebody its manifest: the only one left went in its favour."""
    house.image("web", disk_content())
    job = house.job("web")
    stays, gone = (point for _ in range(2) for point in house.run(job).restore_point_ids)
    house.backups.repositories.opened(job.repository_id).remove(gone)
    house.backups.change_job(job.id, BackupJobChange(retention=Retention(keep_last=1)))
    house.backups.retire(job.id)
    assert house.ended(house.backups.verify(stays)).status == "completed"


def test_an_operator_lets_retention_keep_more_and_only_an_admin_less(house: House) -> None:
    """A run removes what retention does not keep; an operator may remove no point."""
    house.image("web", disk_content())
    job = house.job("web", repository=house.repository())
    few, more = Retention(keep_last=1), Retention(keep_last=1, keep_daily=7)
    for role, retention, allowed in [
        (Role.OPERATOR, few, False),
        (Role.ADMIN, few, True),
        (Role.OPERATOR, more, True),
        (Role.OPERATOR, few, False),
        (Role.OPERATOR, Retention(keep_daily=90), False),
        (Role.OPERATOR, more, True),
        (Role.OPERATOR, Retention(), True),
    ]:
        refused = nullcontext() if allowed else pytest.raises(BackupForbidden, match="needs the role admin")
        with acting(Act("eve", role)), refused:
            house.backups.change_job(job.id, BackupJobChange(retention=retention))
        if allowed:
            assert house.backups.job(job.id).retention == retention
    with acting(Act("eve", Role.OPERATOR)):
        house.backups.change_job(job.id, BackupJobChange(quiesce="off"))
