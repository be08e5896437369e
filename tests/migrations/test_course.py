"""The course of a job: bounded, and never a lie about how much was copied when."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from synvirt.jobs.course import SAMPLES_MAX, Course
from synvirt.migrations.memory import CourseMemory
from synvirt.store.documents import parsed

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
