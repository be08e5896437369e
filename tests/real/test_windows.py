"""Drivers put into a Windows guest by the real virt-v2v-in-place: a phony Windows, and what it is like afterwards.

A whole job that does so from an image, by a real service: tests/real/test_wmi_service.py."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from synvirt.errors import Cancelled, V2vFailed
from synvirt.guests.virt_v2v import VirtV2vInPlace
from synvirt.model.machine import Nic
from synvirt.programs import run
from tests.guests import phony_windows
from tests.guests.conversions import KVM, NAME, manifest, need_conversions
from tests.running.processes import children, until

# An appliance starts in each conversion, some 15 s of a processor without KVM, and longer beside other tests.
pytestmark = pytest.mark.timeout(900)


class Lab:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.disk = folder / "windows.raw"
        self.drivers = folder / "virtio-win"
        self.messages: list[tuple[str, str]] = []

    def windows(self, **state: bool) -> str:
        phony_windows.disk(self.disk, self.folder, **state)
        return str(self.disk)

    def preparer(self, windows: str = "2k22", *, image: Path | None = None) -> VirtV2vInPlace:
        drivers = image or phony_windows.drivers(self.drivers, windows=windows)
        return VirtV2vInPlace(self.folder / "conversions", drivers, self.folder / "no-tools", kvm=KVM)

    def convert(self, preparer: VirtV2vInPlace, stop: Callable[[], bool] = lambda: False) -> None:
        preparer.convert(NAME, manifest(), [str(self.disk)], lambda kind, text: self.messages.append((kind, text)), stop)

    def digest(self) -> str:
        return phony_windows.digest(self.disk)


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    need_conversions(monkeypatch)
    return Lab(tmp_path)


@pytest.fixture
def all_in_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the appliance has it in its arguments: its sockets lie there."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)


@pytest.mark.parametrize(
    ("state", "drivers", "words", "hint"),
    [
        ({"hibernated": True}, "2k22", "was mounted read-only", "powercfg /h off"),
        ({"encrypted": True}, "2k22", "could not read key", "BitLocker"),
        ({}, "w7", "no virtio drivers available for this version of Windows", "newer or an older one"),
    ],
    ids=["hibernated", "bitlocker", "no-driver"],
)
def test_a_bad_conversion_says_why_and_leaves_the_volume_as_it_was(
    lab: Lab, state: dict[str, bool], drivers: str, words: str, hint: str
) -> None:
    lab.windows(**state)
    before = lab.digest()
    preparer = lab.preparer(drivers)
    with pytest.raises(V2vFailed) as caught:
        lab.convert(preparer)
    assert words in caught.value.detail
    assert str(lab.folder) not in caught.value.detail
    assert hint in (caught.value.hint or "")
    preparer.discard(NAME)
    assert lab.digest() == before
    assert not list((lab.folder / "conversions").iterdir())


@pytest.mark.parametrize(
    ("gone", "words"), [("NetKVM", "no virtio network driver"), ("viostor", "no virtio block device driver")]
)
def test_a_windows_for_which_one_driver_is_missing_is_not_converted(lab: Lab, gone: str, words: str) -> None:
    """The tool succeeds, and means that the guest gets an emulated device."""
    windows, preparer = lab.windows(), lab.preparer()
    shutil.rmtree(lab.drivers / gone)
    with_a_card = manifest().model_copy(update={"nics": (Nic(key="nic-0", model="vmxnet3"),)})
    with pytest.raises(V2vFailed, match=words) as caught:
        preparer.convert(NAME, with_a_card, [windows], lambda *_: None, lambda: False)
    assert "--conversion never" in (caught.value.hint or "")


def test_an_agent_that_could_not_be_installed_is_found_before_anything_is_copied(lab: Lab) -> None:
    preparer = lab.preparer(image=phony_windows.driver_image(lab.folder / "virtio.iso", lab.folder, agent=True))
    with pytest.raises(V2vFailed, match=r"rhsrvany\.exe or pvvxsvc\.exe") as caught:
        preparer.check(manifest())
    assert "virt_tools_dir" in (caught.value.hint or "")
    (lab.folder / "no-tools").mkdir()
    (lab.folder / "no-tools" / "rhsrvany.exe").touch()
    preparer.check(manifest())


@pytest.mark.usefixtures("all_in_the_folder")
def test_a_cancelled_conversion_ends_its_appliance_and_leaves_the_volume(lab: Lab) -> None:
    lab.windows()
    before = lab.digest()
    with pytest.raises(Cancelled):
        lab.convert(lab.preparer(), stop=lambda: any("guestfsd.sock" in command for command in appliances(lab)))
    until(lambda: not appliances(lab))
    assert lab.digest() == before


@pytest.mark.usefixtures("all_in_the_folder")
def test_a_killed_service_takes_the_conversion_with_it_and_the_next_one_starts_over(lab: Lab) -> None:
    """Of a rehearsal's clone, an overlay: the volume under it is only read."""
    lab.windows()
    before, clone, preparer = lab.digest(), str(lab.folder / "clone.raw"), lab.preparer()
    run(["qemu-img", "create", "-q", "-f", "qcow2", "-F", "raw", "-b", str(lab.disk), clone], timeout_s=60)
    beneath = {clone: str(lab.disk)}
    argv = [
        sys.executable,
        "-m",
        "tests.guests.windows_child",
        str(lab.folder / "conversions"),
        str(lab.drivers),
        clone,
        str(lab.disk),
    ]
    laid = phony_windows.digest(Path(clone))
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if "Inspecting" in line:
                break
        child.send_signal(signal.SIGKILL)
    until(lambda: not appliances(lab))
    assert phony_windows.digest(Path(clone)) == laid
    preparer.convert(NAME, manifest(), [clone], lambda kind, text: None, lambda: False, backing=beneath)
    assert phony_windows.digest(Path(clone)) == laid
    preparer.adopt(NAME, [clone], backing=beneath)
    preparer.adopt(NAME, [clone], backing=beneath)
    preparer.discard(NAME)
    assert lab.digest() == before
    seen = lab.folder / "seen.raw"
    run(["qemu-img", "convert", "-f", "qcow2", "-O", "raw", clone, str(seen)], timeout_s=60)
    phony_windows.assert_converted(seen, lab.folder)


def appliances(lab: Lab) -> list[str]:
    """Programs anywhere on the machine that have this test's folder in their arguments."""
    return [command for pid, command in children(1).items() if str(lab.folder) in command and pid != os.getpid()]
