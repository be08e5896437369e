"""How many cases a property test draws: modest by default and the same each time, thousands of new ones with CASES_TIMES=50 in
the environment. How they are drawn: conftest.py.
"""

import os

from hypothesis import Phase, settings

TIMES = int(os.environ.get("CASES_TIMES", "1"))


def cases(number: int) -> settings:
    """`number` cases at CASES_TIMES=1."""
    return settings(max_examples=number * TIMES, phases=[Phase.explicit, Phase.generate, Phase.shrink])
