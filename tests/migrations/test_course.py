"""The course of a job: bounded, and never a lie about how much was copied when."""

import asyncio
from itertools import pairwise
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import update

from synvirt.jobs.course import SAMPLES_MAX, Course
from synvirt.migrations.engine import Engine
from synvirt.migrations.memory import CourseMemory
from synvirt.model.kinds import State
from synvirt.store.documents import parsed
from synvirt.store.tables import memory
from tests.fakes.workers import in_process
from tests.house import House, offline_plan

STEPS = st.lists(st.tuples(st.floats(-2, 40), st.integers(0, 1 << 30)), min_size=1, max_size=1500)


@given(STEPS)
def test_it_stays_small_and_keeps_its_ends(steps: list[tuple[float, int]]) -> None:
    course, at, done, latest = Course(), 1.7e9, 0, 0.0
    for seconds, count in steps:
        at, done = at + seconds, done + count
        latest = max(latest, at)
        course = course.with_sample(at, done)
        assert len(course.samples) < SAMPLES_MAX
        assert course.samples[-1].bytes_done == done
    assert all(sooner.at < later.at for sooner, later in pairwise(course.samples))
    assert all(sooner.bytes_done <= later.bytes_done for sooner, later in pairwise(course.samples))
    assert abs(course.samples[-1].at - latest) <= 0.01  # hundredths are kept
    assert parsed(CourseMemory, CourseMemory(course=course).model_dump_json()).course == course


def test_a_long_one_keeps_its_shape() -> None:
    """Two hours, half of them fast: each sample left is one that was made."""
    course = Course()
    made = {(float(second), min(second, 3600) * 1000 + max(0, second - 3600)) for second in range(7200)}
    for at, done in sorted(made):
        course = course.with_sample(at, done)
    assert set(course.samples) <= made
    assert len(course.samples) > SAMPLES_MAX / 3
    assert course.samples[0].at == 0
    assert max(later.at - sooner.at for sooner, later in pairwise(course.samples)) <= 2 * course.every_s


def test_a_job_whose_course_cannot_be_read_runs_all_the_same(tmp_path: Path) -> None:
    house = House(tmp_path, workers=in_process)
    (house.imports / "appliance").mkdir()
    (house.imports / "appliance" / "disk-0.raw").write_bytes(bytes(4096))
    job = house.intake.submit(offline_plan(house.imports / "appliance"))
    house.store.memory.change(job.id, CourseMemory, lambda before: before)
    with house.store._writing() as db:
        db.execute(update(memory).values(version="2.0"))
    asyncio.run(Engine(house.rooms, host="local").run(job.id))
    assert house.store.get(job.id).state is State.COMPLETED
    house.close()
