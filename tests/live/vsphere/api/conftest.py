"""The one disk of vim_api's tests, and a reader's order for it."""

from pathlib import Path

import pytest

from synvirt.disks.specs import DatastoreSpec
from tests.fakes.vcenter import VCenter
from tests.live.vsphere.api.asking import VM, ask, content, opened


@pytest.fixture
def disk(platform: VCenter) -> Path:
    """The running VM's disk, as its guest sees it."""
    return platform.add_disk(VM, content())


@pytest.fixture
def spec(platform: VCenter, disk: Path) -> DatastoreSpec:
    """The disk in a snapshot that is there until the test ends, to be read without a session of the adapter's."""
    found, _ = ask(platform.access(), lambda adapter: opened(adapter, "synvirt-a-1"))
    assert isinstance(found, DatastoreSpec)
    return found


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("synvirt.disks.vsphere.datastore.RETRY_DELAYS_S", (0.01, 0.01, 0.01))
