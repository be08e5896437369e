"""A disk of the running VM, a lease that lives, and houses for jobs that read the disk."""

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from synvirt.disks.specs import LeaseSpec, ReaderSpec
from synvirt.live.vsphere.adapter import VimApi
from tests.fakes.vcenter import DISK_BYTES, VCenter
from tests.live.vsphere.lease.lab import LeaseHouse, ask, by_lease, forgotten, opened
from tests.live.vsphere.test_vim_jobs import VM, VimHouse
from tests.needs import need


@pytest.fixture
def disk(platform: VCenter) -> Path:
    """The running VM's disk: data with holes, the last MiB among them, in grains that are not all whole."""
    need("qemu-img", "qemu-utils")
    generator = random.Random(11)
    content = bytearray(DISK_BYTES)
    content[: 1 << 20] = generator.randbytes(1 << 20)
    content[(1 << 20) + 70_000 : (1 << 20) + 70_100] = generator.randbytes(100)
    content[2 << 20 : 3 << 20] = b"compresses well " * 65536
    return platform.add_disk(VM, bytes(content))


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("synvirt.live.vsphere.lease.READY_POLL_S", 0.02)
    monkeypatch.setattr("synvirt.live.vsphere.lease.BUSY_POLL_S", 0.05)
    monkeypatch.setattr("synvirt.migrations.passes.RETRY_PAUSES_S", (0.05, 0.05, 0.05))


@pytest.fixture
def spec(platform: VCenter, disk: Path) -> LeaseSpec:
    """Of a lease that lives, with nobody who says its progress, until the test ends."""

    async def use(adapter: VimApi) -> ReaderSpec:
        found = await opened(adapter)
        forgotten(adapter)
        adapter._session.close = adapter._session._forget  # type: ignore[method-assign]
        return found

    found = ask(by_lease(platform), use)
    assert isinstance(found, LeaseSpec)
    return found


@pytest.fixture
def house(tmp_path: Path, platform: VCenter) -> Iterator[LeaseHouse]:
    folder = tmp_path / "house"
    folder.mkdir()
    with contextlib.closing(LeaseHouse(folder, platform)) as made:
        yield made


@pytest.fixture
def by_any_way(tmp_path: Path, platform: VCenter) -> Iterator[VimHouse]:
    folder = tmp_path / "any"
    folder.mkdir()
    with contextlib.closing(VimHouse(folder, platform)) as made:
        yield made
