"""How many cases a property test draws: modest by default, thousands with CASES_TIMES=50 in the environment."""

import os

from hypothesis import HealthCheck, Phase, settings

TIMES = int(os.environ.get("CASES_TIMES", "1"))


def cases(number: int) -> settings:
    """`number` cases at CASES_TIMES=1. Each may run programs, so that they are slow is no finding."""
    return settings(
        max_examples=number * TIMES,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
        phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
        print_blob=True,
    )
