"""How fast a job copied, over time, for charts.

A sample has a time, and the bytes copied by then. So samples can be left out: the rate between two others is the mean. When
there are SAMPLES_MAX of them, every second one is deleted, and from then on they are taken half as often.
"""

from typing import NamedTuple, Self

# More than a chart can show; 240 samples are 6 KB in the store.
SAMPLES_MAX = 240
EVERY_S = 1.0
# Seconds between two writes to the store. A restart loses this much of the course; the chart shows the mean of that time.
KEPT_EVERY_S = 15.0


class Sample(NamedTuple):
    """`at`: seconds since 1970, UTC. `bytes_done`: of all passes so far."""

    at: float
    bytes_done: int


class Course(NamedTuple):
    """`samples` ascend; the newest may be closer to the one before it than `every_s`."""

    every_s: float = EVERY_S
    samples: tuple[Sample, ...] = ()

    def with_sample(self, at: float, bytes_done: int) -> Self:
        """The course with one more sample. The first sample stays. After the clock was set back, no sample is added until it
        has caught up."""
        new, kept = Sample(round(at, 2), bytes_done), self.samples
        if kept and new.at <= kept[-1].at:
            return self._replace(samples=(*kept[:-1], Sample(kept[-1].at, bytes_done)))
        if len(kept) >= 2 and kept[-1].at - kept[-2].at < self.every_s:
            kept = kept[:-1]
        kept = (*kept, new)
        if len(kept) < SAMPLES_MAX:
            return self._replace(samples=kept)
        return self._replace(every_s=self.every_s * 2, samples=(*kept[:-1:2], new))
