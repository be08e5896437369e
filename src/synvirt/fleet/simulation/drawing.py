"""Durations as a site's jobs had them."""

import math
import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Draws:
    """Factors for forecast durations, drawn from a site's residuals. `common`: the whole run's part of each factor."""

    def __init__(self, residuals: Sequence[float], seed: int, common: float | None = None) -> None:
        self._random = random.Random(seed)  # noqa: S311 - a forecast, no secret
        self._residuals = tuple(one for one in residuals if 0 < one < 1000) or (1.0,)
        self._common = common if common is not None else self._random.choice(self._residuals)

    def one(self) -> float:
        """The next factor."""
        return math.sqrt(self._common * self._random.choice(self._residuals))


def quantile(ascending: Sequence[T], share: float) -> T:
    """The value that `share` of the values do not exceed."""
    return ascending[min(len(ascending) - 1, math.ceil(share * len(ascending)) - 1)]
