"""A vCenter of the simulator's for vim_api; a Hyper-V host of our own for wmi_api, and a Prism for prism_api."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.hyperv.host import FakeHost, hyperv_host
from tests.fakes.prism.lab import by_iscsi, by_nfs, cluster
from tests.fakes.vcenter import VCenter, vcenter

__all__ = ["by_iscsi", "by_nfs", "cluster", "hyperv", "platform"]


@pytest.fixture
def platform(tmp_path: Path) -> Iterator[VCenter]:
    with vcenter(tmp_path / "vcenter") as running:
        yield running


@pytest.fixture(scope="module")
def hyperv(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeHost]:
    """One for all tests of a module: each makes VMs of its own."""
    with hyperv_host(tmp_path_factory.mktemp("hyperv")) as running:
        yield running
