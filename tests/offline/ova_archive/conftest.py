"""The files of an appliance."""

import pytest

from tests.offline import appliances


@pytest.fixture
def files() -> dict[str, bytes]:
    return appliances.appliance("virtualbox")
