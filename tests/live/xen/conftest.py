"""A pool of XenServer for each test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.xenserver import XenServer, xenserver


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[XenServer]:
    with xenserver(tmp_path / "pool") as running:
        yield running
