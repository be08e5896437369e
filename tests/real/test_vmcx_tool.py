"""A Hyper-V export imported by an outside tool, by the whole service and real QEMU: the guest runs as it does the other way."""

from pathlib import Path

import pytest

from synvirt.model.kinds import OfflineKind
from synvirt.sample import Sample
from tests.offline.hyperv import conversion_tool
from tests.real.test_each_kind import data_dir, imported
from tests.real.wrapped import WRAPS

# Fixtures are found by their names.
__all__ = ("data_dir",)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_it_ends_as_a_running_guest(data_dir: Path, sample: Sample, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYNVIRT_VMCX_TOOL", conversion_tool.install(data_dir.parent / "bin"))
    monkeypatch.setenv("SYNVIRT_VMCX_TOOL_ARGUMENTS", conversion_tool.arguments("well"))
    path = WRAPS[OfflineKind.VMCX_EXPORT](data_dir / "imports", sample)
    answer = imported(data_dir, OfflineKind.VMCX_EXPORT, path)
    job = answer["job"]
    assert job["state"] == "Completed", job["last_error"]
    assert (job["boot_sign"], answer["id"]) == ("agent", sample.id)
    assert [one["number"] for one in job["passes"]] == [1, 2], "the tool did not do it"
    assert list((data_dir / "passthrough").iterdir()) == []
