"""A rehearsed guest that no firmware finds by itself gets a boot entry on its clone, and leaves none behind."""

from pathlib import Path
from uuid import uuid4

import pytest

from synvirt.machines.loader import Loader
from synvirt.model.machine import VmManifest
from synvirt.model.rehearsal import RehearsalState
from tests.fakes.hypervisor import FakeHypervisor
from tests.fakes.live import FakeAdapter
from tests.rehearsals.stage import Stage


@pytest.mark.parametrize("firmware", ["uefi", "bios"])
def test_a_loader_gets_an_entry_for_its_rehearsal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, firmware: str) -> None:
    described, added = FakeAdapter.inspect, list[tuple[object, list[str]]]()

    async def inspect(self: FakeAdapter, vm_id: str) -> VmManifest:
        return (await described(self, vm_id)).model_copy(update={"firmware": firmware})

    class Noting(FakeHypervisor):
        def add_entries(self, job_id, entries, *, secure):  # type: ignore[no-untyped-def]
            added.append((job_id, [one.name for one in entries]))
            return super().add_entries(job_id, entries, secure=secure)

    monkeypatch.setattr(FakeAdapter, "inspect", inspect)
    stage = Stage(tmp_path / "house", hypervisor := Noting())
    stage.house.loaders = [Loader(1, 2048, 6144, uuid4(), r"\EFI\debian\shimx64.efi")]
    job = stage.submit()
    stage.begin_job(job.id)
    stage.holds(job.id)
    found = stage.rehearse(job.id)
    assert found.state is RehearsalState.PASSED
    assert added == ([(found.id, ["Boot0000", "BootOrder"])] if firmware == "uefi" else [])
    assert hypervisor.variables == {}
    stage.cancel(job.id)
    stage.close()
