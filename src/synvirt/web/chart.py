"""A job's throughput over time, as the numbers of a drawing: an SVG without a style of its own, its scales, and a sentence.

The drawing is as wide as its place: WIDTH × HEIGHT units are stretched over it, and the words are next to it, in HTML, so that
they are readable on a phone too. Steps, not a smooth line: each is the mean of what was copied between two samples.
"""

from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise

from synvirt.jobs.course import Course, Sample
from synvirt.sizes import KIB, duration
from synvirt.web.words import rate

WIDTH, HEIGHT = 1000, 100
# Possible ends of a scale, in its unit; half of each is a round figure too.
ENDS_OF_SCALE = (1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400, 600, 800, KIB)
# For longer jobs, a time of day alone is ambiguous.
LONG_S = 20 * 3600


@dataclass(frozen=True, slots=True)
class Chart:
    """`line` and `area`: SVG paths (SVG 2 section 9.3). `rates`: from top to bottom; `times`: from left to right."""

    line: str
    area: str
    rates: tuple[str, ...]
    times: tuple[str, ...]
    summary: str


def chart(course: Course) -> Chart | None:
    """The chart. None, while there is nothing to draw: it needs two samples with time between them."""
    samples = _spaced(course)
    if len(samples) < 2:
        return None
    rates = [max(0.0, (later.bytes_done - sooner.bytes_done) / (later.at - sooner.at)) for sooner, later in pairwise(samples)]
    began, ended = samples[0].at, samples[-1].at
    top = scale_end(max(rates))
    across = [round((sample.at - began) / (ended - began) * WIDTH) for sample in samples]
    up = [round(HEIGHT - one / top * HEIGHT) for one in rates]
    line = f"M0 {up[0]}" + "".join(f"V{height}H{right}" for height, right in zip(up, across[1:], strict=True))
    return Chart(
        line=line,
        area=f"{line}V{HEIGHT}H0Z",
        rates=(rate(top), rate(top / 2), "0"),
        times=tuple(_time(at, ended - began) for at in (began, (began + ended) / 2, ended)),
        summary=_summary(samples, rates),
    )


def scale_end(highest: float) -> float:
    """The lowest round figure that is not below the highest rate; 1 KiB/s at least."""
    unit = KIB
    while highest > unit * KIB:
        unit *= KIB
    return float(next(unit * end for end in ENDS_OF_SCALE if unit * end >= highest))


def _spaced(course: Course) -> list[Sample]:
    """Joins steps that are so short that one message would look like a peak."""
    samples = list(course.samples)
    if len(samples) > 2 and samples[-1].at - samples[-2].at < course.every_s / 2:
        del samples[-2]
    return samples


def _summary(samples: list[Sample], rates: list[float]) -> str:
    """The drawing in a sentence, for people who do not see it, or want the figures."""
    seconds = samples[-1].at - samples[0].at
    mean = max(0, samples[-1].bytes_done - samples[0].bytes_done) / seconds
    highest = max(range(len(rates)), key=rates.__getitem__)
    return (
        f"{rate(mean)} on average over {duration(seconds)}; "
        f"at most {rate(rates[highest])}, at {_time(samples[highest].at, seconds)}; {rate(rates[-1])} at last"
    )


def _time(at: float, span_s: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%m-%d %H:%M" if span_s >= LONG_S else "%H:%M:%S")
