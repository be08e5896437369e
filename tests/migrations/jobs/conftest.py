"""A house for one job."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house import House


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path)
    yield house
    house.close()
