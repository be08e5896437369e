"""What a job's window says at each moment: open or not, until when, and whether an outage fits in."""

import asyncio
import math
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from synvirt.errors import NotFound
from synvirt.migrations.warm import window as of_window
from synvirt.model.job import OutageForecast, StateVisit
from synvirt.model.kinds import State
from synvirt.model.windows import Window

SECOND, HOUR = timedelta(seconds=1), timedelta(hours=1)
OPENS = datetime(2030, 1, 1, 22, tzinfo=UTC)
CLOSES = OPENS + 6 * HOUR
ONCE = Window(id="night", name="n", start=OPENS.replace(tzinfo=None), end=CLOSES.replace(tzinfo=None))
NIGHTLY = ONCE.model_copy(update={"rrule": "FREQ=DAILY"})


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Callable[[datetime], None]:
    return lambda moment: monkeypatch.setattr(of_window, "now", lambda: moment)


def job(window: Window | None, *, named: bool = True, p95_s: float | None = None, history: tuple[StateVisit, ...] = ()) -> Any:
    """As much of a job as its window looks at. `window`: the stored one."""

    def get(_: str) -> Window:
        if window is None:
            raise NotFound("there is no such window")
        return window

    async def in_thread(call: Callable[..., Any], *given: Any) -> Any:
        return call(*given)

    outage = None if p95_s is None else OutageForecast(p50_s=1, p95_s=p95_s, at=OPENS)
    warm = SimpleNamespace(window_id="night" if named else None)
    return SimpleNamespace(
        migration=SimpleNamespace(plan=SimpleNamespace(warm=warm), outage=outage, history=history),
        rooms=SimpleNamespace(store=SimpleNamespace(windows=SimpleNamespace(get=get))),
        in_thread=in_thread,
    )


@pytest.mark.parametrize(
    ("moment", "is_open", "opens_in", "opens_nightly_in"),
    [
        (OPENS - HOUR, False, HOUR, HOUR),
        (OPENS - SECOND, False, SECOND, SECOND),
        # It is open: what is waited for is the next time.
        (OPENS, True, None, 24 * HOUR),
        (OPENS + HOUR, True, None, 23 * HOUR),
        (CLOSES - SECOND, True, None, 18 * HOUR + SECOND),
        (CLOSES, False, None, 18 * HOUR),
    ],
)
def test_it_is_open_from_its_first_moment_to_its_end(
    at: Callable[[datetime], None], moment: datetime, is_open: bool, opens_in: timedelta | None, opens_nightly_in: timedelta
) -> None:
    at(moment)
    assert asyncio.run(of_window.is_open(job(ONCE))) is is_open
    assert asyncio.run(of_window.is_open(job(NIGHTLY))) is is_open
    expected = math.inf if opens_in is None else opens_in.total_seconds()
    assert asyncio.run(of_window.opens_in_s(job(ONCE))) == expected
    assert asyncio.run(of_window.opens_in_s(job(NIGHTLY))) == opens_nightly_in.total_seconds()


@pytest.mark.parametrize("found", [job(None), job(None, named=False), job(ONCE.model_copy(update={"rrule": "FREQ=NEVER"}))])
def test_without_one_that_can_open_nothing_is_waited_for(at: Callable[[datetime], None], found: Any) -> None:
    at(OPENS)
    assert asyncio.run(of_window.is_open(found)) is False
    assert asyncio.run(of_window.opens_in_s(found)) == math.inf


@pytest.mark.parametrize(
    ("moment", "p95_s", "reported"),
    [
        (CLOSES - 60 * SECOND, 60, None),
        (CLOSES - 60 * SECOND, 61, "the outage may take 61 s (p95), and window night is open for 60 s more"),
        (CLOSES - 60 * SECOND, None, None),  # nothing is known of it yet
        (CLOSES, 0, "window night has closed"),
        (CLOSES, None, "window night has closed"),
        (OPENS - SECOND, 0, "window night has closed"),
    ],
)
def test_an_outage_fits_into_the_rest_of_it(
    at: Callable[[datetime], None], moment: datetime, p95_s: float | None, reported: str | None
) -> None:
    at(moment)
    assert asyncio.run(of_window.too_short(job(ONCE, p95_s=p95_s))) == reported
    assert asyncio.run(of_window.too_short(job(ONCE, p95_s=p95_s, named=False))) is None


def test_a_cut_over_is_over_with_the_opening_in_which_it_began(at: Callable[[datetime], None]) -> None:
    began = OPENS + HOUR
    visits = StateVisit(state=State.DELTA_SYNCING, at=OPENS - HOUR), StateVisit(state=State.CUTTING_OVER, at=began)
    at(OPENS + 25 * HOUR)  # the service was away for a day, and another opening has begun
    assert asyncio.run(of_window.closes_at(job(NIGHTLY, history=visits))) == CLOSES
    assert asyncio.run(of_window.closes_at(job(NIGHTLY, history=visits[:1]))) == CLOSES + 24 * HOUR  # it begins now
    later = ONCE.model_copy(update={"start": began.replace(tzinfo=None) + SECOND})
    assert asyncio.run(of_window.closes_at(job(later, history=visits))) == began  # changed since
    assert asyncio.run(of_window.closes_at(job(None, history=visits))) == began  # removed since
    assert asyncio.run(of_window.closes_at(job(NIGHTLY, history=visits, named=False))) is None
