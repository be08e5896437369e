"""A simulation of a wave, by the same scheduler that will run it. It has no I/O, and gives the same answer for the same seed.

    Load (size, change rate, outage) + Site (measured rates) ─▶ runs ─▶ Simulation: when each member begins, is ready and cuts
    over, and what it waited for

    nouns         Load, Site, MemberForecast, Simulation
    running       one run: copies share bandwidth, cut-overs take their time, the scheduler decides
    drawing       durations as this site's jobs had them
    explaining    why a member cuts over when it does, and what holds the wave back
    forecast      many runs, and the forecast that they give
    changes       the same wave with other numbers, and the difference in a sentence

Copies that run share the bandwidth of their source host, their destination and the network. What keeping ready copies fresh
takes is subtracted first. A first run has every duration as forecast, and is the plan. Other runs draw each duration from the
site's residuals (real divided by forecast, of jobs that ended); the end's p95 is the p95 of their ends. Half of a residual's
logarithm is the run's own, since a site that is slow is slow for all. The simulation takes approvals as given: it cannot know
when somebody approves.
"""

import os

# numpy shares out bandwidth here, and multiplies no matrices: starting its threads for that takes longer than loading it.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
