"""A vCenter of the simulator's, for tests of vim_api."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.vcenter import VCenter, vcenter


@pytest.fixture
def platform(tmp_path: Path) -> Iterator[VCenter]:
    with vcenter(tmp_path / "vcenter") as running:
        yield running
