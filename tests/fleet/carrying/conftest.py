"""A night for each test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fleet.carrying.night import Night


@pytest.fixture
def night(tmp_path: Path) -> Iterator[Night]:
    made = Night(tmp_path / "house")
    yield made
    made.close()
