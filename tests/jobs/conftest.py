"""The process that inspects files, for all tests of a module."""

from collections.abc import Iterator

import pytest

from synvirt.jobs.inspecting.looking import CagedLooking


@pytest.fixture(scope="module")
def looking() -> Iterator[CagedLooking]:
    made = CagedLooking()
    yield made
    made.close()
