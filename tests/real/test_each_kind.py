"""The same guest in each container that is imported: every kind ends as a running guest, by the whole service and real QEMU.

Of two kinds a Linux boots, whose agent is asked. Of the others it is a boot record that shows a login prompt and halts, as the
boot of an emulated Linux takes seconds of a processor: there the whole volume is compared. `packaging/prove-deb.sh` boots the
Linux of every kind.
"""

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from synvirt.model.kinds import OfflineKind
from synvirt.sample import Sample
from tests.real.guests import halting_linux
from tests.real.one_job import digest
from tests.real.wrapped import NAMED, SINGLE_DISKS, WRAPS
from tests.running import forked
from tests.running.processes import command_line

# The kinds whose files are those that the sample comes in.
BOOTS_LINUX = (OfflineKind.OVA_ARCHIVE, OfflineKind.OVF_FOLDER)

# As Linux reads, at hardware of version 13 and later, the UUID that wrapped.py's folder names.
READ_AT_VSPHERE = ["5c241f42-a87f-fa60-6af6-a46351ced0eb", "VMware-42 1f 24 5c 7f a8 60 fa-6a f6 a4 63 51 ce d0 eb"]


@pytest.fixture(scope="module")
def halting(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    folder = tmp_path_factory.mktemp("halting")
    raw = halting_linux(folder / "halting.raw")
    return Sample(folder / "none.ova", "", raw.stat().st_size, raw)


@pytest.fixture
def data_dir(tmp_path: Path) -> Iterator[Path]:
    data_dir = tmp_path / "data"
    (data_dir / "imports").mkdir(parents=True)
    yield data_dir
    # The embedded driver's guests outlive a service that failed.
    for entry in Path("/proc").glob("[0-9]*"):
        command = command_line(int(entry.name))
        if "qemu-system" in command.split(" ")[0] and str(data_dir) in command:
            os.kill(int(entry.name), signal.SIGKILL)


def imported(data_dir: Path, kind: OfflineKind, path: Path) -> dict[str, Any]:
    plan = {
        "source": {"Offline": kind},
        "source_ref": {"kind": "offline_host_path", "path": str(path)},
        "mode": "Cold",
        "target": NAMED if kind in SINGLE_DISKS else {},
    }
    argv = [sys.executable, "-m", "tests.real.one_job", str(data_dir)]
    done = forked.run(argv, input=json.dumps(plan), capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", WRAPS)
def test_it_ends_as_a_running_guest(kind: OfflineKind, data_dir: Path, request: pytest.FixtureRequest) -> None:
    sample: Sample = request.getfixturevalue("sample" if kind in BOOTS_LINUX else "halting")
    path = WRAPS[kind](data_dir / "imports", sample)
    answer = imported(data_dir, kind, path)
    job = answer["job"]
    assert job["state"] == "Completed", job["last_error"]
    if kind in BOOTS_LINUX:
        assert (job["boot_sign"], answer["id"]) == ("agent", sample.id)
        by_itself = [job["domain"]["uuid"], ""]
        assert answer["shown"] == (READ_AT_VSPHERE if kind is OfflineKind.OVF_FOLDER else by_itself)
    else:
        assert sample.raw is not None
        assert (job["boot_sign"], answer["digests"]) == ("console", [digest(sample.raw)])
        # What the Linux of the others boots from.
        assert 'bus="virtio"' in job["domain"]["xml"]
    assert [disk["capacity_bytes"] for disk in job["manifest"]["disks"]] == [sample.capacity_bytes]
    assert job["manifest"]["guest_os"]["family"] == "linux"
    assert ("named" in job["domain"]["name"]) == (kind in SINGLE_DISKS)


def test_no_kind_is_left_out() -> None:
    assert set(WRAPS) == set(OfflineKind)
