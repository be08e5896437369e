"""Whether a point boots is judged by its guest alone, and not by a worker that died while it served the guest's disks."""

import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from synvirt.backups.restores import boot_test
from synvirt.backups.restores.boot_test import BootTesting
from synvirt.errors import DomainDefineFailed
from synvirt.kvm import qemu_user
from synvirt.xml_document import parse
from tests.backups.restores.place import Place
from tests.fakes.backups import ended
from tests.fakes.hypervisor import FakeHypervisor
from tests.needs import need
from tests.running.processes import until, workers

start = FakeHypervisor.start


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """With a path short enough for Unix sockets."""
    with tempfile.TemporaryDirectory(prefix="sv-") as folder:
        Path(folder).chmod(0o711)
        yield Path(folder)


@pytest.fixture
def own(place: Place, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Its orders are carried out by worker processes. Its hypervisor has no user and no screens."""
    monkeypatch.setattr(qemu_user, "of", lambda uri: None)
    monkeypatch.setattr(BootTesting, "_picture", lambda *_: None)
    monkeypatch.setattr(place.hypervisor, "boots_from", {None})  # the domain has no mark with its bus
    place.processes = place.exports
    place.restart()
    return place


@pytest.mark.parametrize("fail", ["start", "silent", "boot"])
def test_a_guest_whose_disks_are_not_served_any_more_is_started_again(
    own: Place, monkeypatch: pytest.MonkeyPatch, fail: str
) -> None:
    """Where QEMU does not find them at its start, and where the guest reads errors from then on."""
    starts = list[UUID]()

    def killing(self: FakeHypervisor, uuid: UUID) -> None:
        starts.append(uuid)
        self.fail = ""
        if len(starts) == 1:
            (worker,) = workers()
            os.kill(worker, signal.SIGKILL)
            until(lambda: workers() == [])
            self.fail = fail
        if self.fail == "start":
            raise DomainDefineFailed("Failed to connect to its disk: Connection refused")
        start(self, uuid)

    monkeypatch.setattr(FakeHypervisor, "start", killing)
    monkeypatch.setattr(boot_test, "RETRY_PAUSES_S", (0.0,))
    run = ended(own.backups, own.backups.boot_test(own.point).id)
    assert (run.status, run.error, len(starts)) == ("completed", None, 2)
    found = own.backups.points.get(own.point).boot_test
    assert found is not None
    assert found.result == "booted"
    assert own.left() == []


def test_workers_that_die_again_and_again_are_said_and_are_no_result_of_the_point(
    own: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killing(self: FakeHypervisor, uuid: UUID) -> None:
        start(self, uuid)
        os.kill(workers()[0], signal.SIGKILL)

    monkeypatch.setattr(FakeHypervisor, "start", killing)
    monkeypatch.setattr(boot_test, "RETRY_PAUSES_S", (0.0,))
    own.hypervisor.fail = "silent"
    run = ended(own.backups, own.backups.boot_test(own.point).id)
    assert run.error is not None
    assert (run.error.code, "signal 9" in run.error.message) == ("E_BAK_INTERNAL", True)
    assert own.backups.points.get(own.point).boot_test is None
    assert own.left() == []


def test_a_point_whose_disk_is_damaged_fails_for_that_reason(own: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def reads(self: FakeHypervisor, uuid: UUID) -> None:
        start(self, uuid)
        source: Any = parse(self.domains[uuid].domain.xml, "x").find("devices/disk/source")
        read = [need("qemu-io", "qemu-utils"), "-f", "qcow2", "-c", "read 0 4096", source.get("file")]
        subprocess.run(read, check=False, capture_output=True, timeout=60)

    monkeypatch.setattr(FakeHypervisor, "start", reads)
    own.damage()
    own.hypervisor.fail = "silent"
    run = ended(own.backups, own.backups.boot_test(own.point).id)
    assert run.error is not None
    assert (run.error.code, "has changed" in run.error.message) == ("E_BAK_BOOT_TEST_FAILED", True), run.error
    found = own.backups.points.get(own.point).boot_test
    assert found is not None
    assert (found.result, "has changed" in str(found.trouble)) == ("failed", True)
