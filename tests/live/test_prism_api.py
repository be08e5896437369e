"""prism_api against a Prism of ours that is held to the vendor's schema, and the real servers of its bytes: the laws of
LiveAdapter by each way, then what is in a manifest, then what the platform may do wrong.

What this proves: the order of calls, the shapes, the bytes. What it cannot: a real cluster's timing, and its own tracking.
"""

import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

from synvirt.live import SourceAccess
from synvirt.live.nutanix import prism as prism_module
from synvirt.live.nutanix.adapter import PrismApi
from tests.contracts.live import LiveCase, LiveContract, in_session
from tests.fakes.prism.server import Prisms
from tests.fakes.prism.state import BLOCK

T = TypeVar("T")
SIZE = 4 << 20


def content(seed: int = 0, size: int = SIZE) -> bytes:
    """Data, with holes: every third 256 KiB is zeros."""
    generator = random.Random(seed)
    return b"".join(bytes(1 << 18) if part % 3 == 2 else generator.randbytes(1 << 18) for part in range(size >> 18))


def ask(access: SourceAccess, use: Callable[[PrismApi], Awaitable[T]]) -> T:
    return in_session(lambda: PrismApi(access), use)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prism_module, "RETRY_PAUSES_S", (0.01, 0.01, 0.01))


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
