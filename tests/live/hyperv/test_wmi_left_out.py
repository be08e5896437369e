"""What a guest has at its Hyper-V host and lacks here is named."""

from typing import Any

import pytest

from synvirt.live.hyperv import answers, concerns
from synvirt.live.hyperv.session import script
from synvirt.model.machine import Concern, GuestOs
from tests.live.hyperv.test_wmi_odd import RIGHT


def named(**more: Any) -> dict[str, Concern]:
    """The concerns of a VM with these fields in the answer of inspect.ps1."""
    found = answers.checked("inspect", RIGHT["inspect"] | more, "hv1")
    return {one.id: one for one in concerns.of_machine(found, GuestOs())}


def test_devices_of_the_host_and_inserted_media_are_named() -> None:
    """As in an export of the VM."""
    found = named(pci=2, gpus=1, dvds=["D:\\iso\\virtio.iso"], floppies=["D:\\answers.vfd"])
    assert {"passthrough-device:a PCI Express device (2 times)", "passthrough-device:a GPU"} <= set(found)
    assert "virtio.iso, answers.vfd" in found["media-left-out"].assessment


def test_an_answer_of_an_older_version_has_none_of_them() -> None:
    """Recordings have such."""
    older = {key: value for key, value in RIGHT["inspect"].items() if key not in ("pci", "gpus", "floppies")} | {"dvds": []}
    found = {one.id for one in concerns.of_machine(answers.checked("inspect", older, "hv1"), GuestOs())}
    assert not {"passthrough-device:a GPU", "media-left-out"} & found


@pytest.mark.parametrize("cmdlet", ["Get-VMAssignableDevice", "Get-VMGpuPartitionAdapter"])
def test_the_host_is_asked_where_its_module_can_say_it(cmdlet: str) -> None:
    """An unknown cmdlet would end the script: no VM of an older host could be inspected."""
    text = script("inspect")
    assert f"if (Get-Command -Name {cmdlet} -ErrorAction SilentlyContinue) {{ $" in text
    assert text.count(cmdlet) == 2
