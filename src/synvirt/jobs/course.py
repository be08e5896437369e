"""How fast a job copied, over time: what a chart is drawn from.

A sample says when, and how many bytes the job had copied by then. So any may be left out without a lie: the rate between its
neighbours is the mean of both. When there are SAMPLES_MAX, every second one goes, and from then on they come half as often.
"""

from typing import NamedTuple, Self

# More than a chart has room for; 240 are 6 KB in the store.
SAMPLES_MAX = 240
EVERY_S = 1.0
# What a restart costs of it, as a gap that shows the mean.
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
        """The first sample stays the first, this one is the last. A clock that was set back is waited for."""
        new, kept = Sample(round(at, 2), bytes_done), self.samples
        if kept and new.at <= kept[-1].at:
            return self._replace(samples=(*kept[:-1], Sample(kept[-1].at, bytes_done)))
        if len(kept) >= 2 and kept[-1].at - kept[-2].at < self.every_s:
            kept = kept[:-1]
        kept = (*kept, new)
        if len(kept) < SAMPLES_MAX:
            return self._replace(samples=kept)
        return self._replace(every_s=self.every_s * 2, samples=(*kept[:-1:2], new))
