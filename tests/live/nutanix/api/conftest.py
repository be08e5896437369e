"""The tests of prism_api wait for nothing between two tries."""

import pytest

from synvirt.live.nutanix import prism as prism_module


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prism_module, "RETRY_PAUSES_S", (0.01, 0.01, 0.01))
