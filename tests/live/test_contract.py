"""Every registered platform, held to the laws of LiveAdapter."""

from dataclasses import replace
from pathlib import Path
from typing import ClassVar
from uuid import uuid4

import pytest

from synvirt.errors import BadRequest
from synvirt.live import SourceAccess
from synvirt.live.hyperv import exporting
from synvirt.live.hyperv.adapter import WmiApi
from synvirt.live.registry import PLATFORMS
from synvirt.model.kinds import LiveKind
from tests.contracts.live import LiveCase, LiveContract
from tests.fakes.hyperv.host import EXPORTING, FakeHost
from tests.fakes.hyperv.model import OFF, RUNNING
from tests.fakes.live import TRACKED_BYTES, FakeAdapter, FakePlatform

LOGIN = {"user": "root", "password": "s3cret"}


def malformed(good: SourceAccess) -> tuple[SourceAccess, ...]:
    return (
        replace(good, endpoint="ftp://host"),
        replace(good, endpoint="https://"),
        replace(good, endpoint="https://root:s3cret@host"),
        replace(good, credentials={}),
        replace(good, credentials=dict(good.credentials) | {"unknown": "s3cret"}),
        replace(good, options={"unknown": 1}),
    )


class TestWmiApi(LiveContract):
    """On a host of our own, whose files are real: tests/fakes/hyperv."""

    options: ClassVar[dict[str, str]] = {}

    @pytest.fixture
    def case(self, hyperv: FakeHost) -> LiveCase:
        vm = hyperv.hyperv.add_vm(f"web-{uuid4().hex[:8]}", bytes(range(256)) * (4 << 12))

        def write(offset: int, data: bytes) -> None:
            hyperv.hyperv.guest_writes(vm, offset, data)

        def restart() -> None:
            for state in (RUNNING, OFF):
                hyperv.hyperv.power(vm, state)

        return LiveCase(
            open=lambda: WmiApi(hyperv.access(**self.options)),
            vm_id=vm.id,
            content=lambda: hyperv.hyperv.content(vm),
            write=write,
            # Marks of other tests are not ours to count: each has a VM of its own.
            snapshots=lambda: hyperv.snapshots(vm),
            lose_tracking=lambda: hyperv.hyperv.lose_tracking(vm),
            restart=restart,
        )


class TestWmiApiExporting(TestWmiApi):
    """The same host; it writes the disks to a share, and from there they are read."""

    @pytest.fixture(autouse=True)
    def _quick(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(exporting, "POLL_S", 0.01)

    options = EXPORTING


class TestWmiApiForm:
    @pytest.mark.parametrize("access", malformed(SourceAccess("https://hyperv.example", LOGIN)))
    def test_a_malformed_source_is_refused(self, access: SourceAccess) -> None:
        with pytest.raises(BadRequest) as refused:
            WmiApi(access)
        assert "s3cret" not in str(refused.value)


class TestFake(LiveContract):
    """The stand-in that the warm engine's tests run on keeps the laws of those it stands for."""

    @pytest.fixture
    def case(self, tmp_path: Path) -> LiveCase:
        platform = FakePlatform(tmp_path)
        platform.add_vm("vm-1", {"disk-0": bytes(range(256)) * 256 * 16})

        def write(offset: int, data: bytes) -> None:
            platform.guest_writes("vm-1", "disk-0", offset, data)

        def restart() -> None:
            for power in ("on", "off"):
                platform.power("vm-1", power)

        return LiveCase(
            open=lambda: FakeAdapter(platform),
            vm_id="vm-1",
            content=lambda: platform.disk_path("vm-1", "disk-0").read_bytes(),
            write=write,
            snapshots=lambda: list(platform.vm("vm-1")["snapshots"]),
            lose_tracking=lambda: platform.lose_change_ids("vm-1"),
            restart=restart,
            tracked_bytes=TRACKED_BYTES,
        )


def test_every_kind_is_registered_once() -> None:
    assert sorted(platform.kind for platform in PLATFORMS) == sorted(LiveKind)
