"""Houses for one job. Where a test does not ask for processes, its disks are copied here, by the same code."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.workers import in_process
from tests.house import House


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path, workers=in_process)
    yield house
    house.close()


@pytest.fixture
def house_with_processes(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path)
    yield house
    house.close()
