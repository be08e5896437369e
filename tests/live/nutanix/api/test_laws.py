"""The laws of LiveAdapter, by each way."""

import pytest

from synvirt.live import SourceAccess
from synvirt.live.nutanix.adapter import PrismApi
from tests.contracts.live import LiveCase, LiveContract
from tests.fakes.prism.server import Prisms
from tests.fakes.prism.state import BLOCK
from tests.live.nutanix.api.lab import ask, content


def case_of(prisms: Prisms, access: SourceAccess) -> LiveCase:
    vm = prisms.state.add_vm("web", {"scsi.0": content(), "scsi.1": content(1, 1 << 20)})
    disk = prisms.state.path(vm.disks[0])

    def write(offset: int, data: bytes) -> None:
        assert prisms.state.guest_writes(vm.id, "scsi.0", offset, data)

    def lose_tracking() -> None:
        for kept in list(prisms.state.kept.values()):
            prisms.state.forget(kept)

    def restart() -> None:
        ask(access, lambda adapter: adapter.power_on(vm.id))
        ask(access, lambda adapter: adapter.shutdown(vm.id))

    return LiveCase(
        open=lambda: PrismApi(access),
        vm_id=vm.id,
        content=disk.read_bytes,
        write=write,
        snapshots=prisms.names,
        lose_tracking=lose_tracking,
        restart=restart,
        tracked_bytes=BLOCK,
    )


class TestLawsByNfsFromElementAlone(LiveContract):
    @pytest.fixture
    def case(self, by_nfs: Prisms) -> LiveCase:
        return case_of(by_nfs, by_nfs.access("element"))


class TestLawsByIscsi(LiveContract):
    @pytest.fixture
    def case(self, by_iscsi: Prisms) -> LiveCase:
        return case_of(by_iscsi, by_iscsi.access(transport="iscsi"))
