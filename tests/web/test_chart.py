"""The chart of a job's throughput: what it draws is what was copied, and it says the same in words."""

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from playwright.sync_api import Page, expect

from synvirt.jobs.course import Course, Sample
from synvirt.migrations.memory import CourseMemory
from synvirt.model.job import Progress
from synvirt.model.kinds import State
from synvirt.sizes import MIB
from synvirt.web.chart import ENDS_OF_SCALE, HEIGHT, WIDTH, chart, scale_end
from tests.fakes.service import Service
from tests.web import jobs

COURSES = st.builds(
    lambda steps: Course(samples=tuple(Sample(1.7e9 + sum(s for s, _ in steps[:n]), steps[n][1]) for n in range(len(steps)))),
    st.lists(st.tuples(st.floats(0.5, 5000), st.integers(0, 1 << 50)), max_size=240),
)


@given(COURSES)
def test_every_course_can_be_drawn_within_its_frame(course: Course) -> None:
    drawn = chart(course)
    if len(course.samples) < 2:
        assert drawn is None
        return
    assert drawn is not None
    across = [int(number) for number in re.findall(r"H(\d+)", drawn.line)]
    up = [int(number) for number in re.findall(r"V(\d+)", drawn.line)]
    assert across == sorted(across)
    assert across[-1] == WIDTH
    assert all(0 <= number <= HEIGHT for number in up)
    assert "inf" not in drawn.summary
    assert "nan" not in drawn.summary


@given(st.floats(0, 1e15))
def test_a_scale_is_round_and_not_below_what_it_shows(highest: float) -> None:
    end = scale_end(highest)
    assert end >= highest
    assert any(end == number * 1024**unit for number in ENDS_OF_SCALE for unit in range(1, 6))


def test_a_rate_is_as_high_as_it_was_and_as_long() -> None:
    """100 MiB/s for 30 s, none for 10 s, 50 MiB/s for 60 s."""
    course = Course(samples=(Sample(0, 0), Sample(30, 3000 * MIB), Sample(40, 3000 * MIB), Sample(100, 6000 * MIB)))
    drawn = chart(course)
    assert drawn is not None
    assert drawn.rates == ("100 MiB/s", "50.0 MiB/s", "0")
    assert drawn.line == "M0 0V0H300V100H400V50H1000"
    assert drawn.times == ("00:00:00", "00:00:50", "00:01:40")
    words = "60.0 MiB/s on average over 1 min 40 s; at most 100 MiB/s, at 00:00:00; 50.0 MiB/s at last"
    assert drawn.summary == words


def test_a_jobs_page_draws_it_live_and_keeps_it(page: Page, service: Service) -> None:
    job_id = jobs.added(service, "charted", (State.QUEUED, 70), (State.COPYING_FULL, 65))
    page.goto(f"/migrations/{job_id}")
    expect(page.locator("#chart svg")).to_have_count(0)
    began = time.time() - 60
    course = Course().with_sample(began, 0).with_sample(began + 30, 3000 * MIB)
    service.board.take_up(job_id, course)
    picture = page.get_by_role("img", name="100 MiB/s on average over 30 s")
    expect(picture).to_be_visible()
    figure = Progress(bytes_total=9000 * MIB, bytes_done=3600 * MIB)
    service.board.pin(job_id, State.COPYING_FULL, figure)
    # 600 MiB in about half a minute, slower than before: the pace of this test is not known to the second.
    expect(page.locator("#chart-summary")).to_contain_text("at most 100 MiB/s")
    expect(page.locator("#chart-summary")).not_to_contain_text("over 30 s")
    so_far = service.board.courses()[job_id]
    service.store.memory.change(job_id, CourseMemory, lambda _: CourseMemory(course=so_far))
    service.board.unpin(job_id)
    service.move(job_id, State.COMPLETED)
    page.reload()
    expect(page.locator(".stations .end b")).to_have_text("Completed")
    expect(page.locator("#chart svg .line")).to_have_attribute("d", re.compile(r"^M0 \d+V"))
    box = page.locator("#chart svg").bounding_box()
    assert box is not None
    assert box["height"] == pytest.approx(144, abs=3)
