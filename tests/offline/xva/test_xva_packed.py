"""XVA archives packed by gzip and zstd: what they are taken for, how little of them is looked at, and whole jobs."""

import contextlib
import os
import shutil
import signal
import subprocess
import tarfile
import threading
import time
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from random import Random

import pytest

from synvirt.errors import MalformedArchive, UnsupportedFormat
from synvirt.model.job import Migration
from synvirt.model.kinds import OfflineKind, State
from synvirt.offline.registry import UnknownKind, detect
from synvirt.store import Store
from tests.counted import bytes_read
from tests.disks.xva import xva_archives
from tests.disks.xva.xva_archives import MIB
from tests.fakes.hypervisor import FakeHypervisor
from tests.fakes.workers import in_process
from tests.house import House, offline_plan
from tests.kinds.copies import copy_as_killed
from tests.offline import appliances, test_partitions
from tests.offline.xva import geneva_exports, ova_xml_text
from tests.running.processes import workers

PACKINGS = ("gzip", "zstd")
both = pytest.mark.parametrize("packing", PACKINGS)


def some_disk(seed: int, mebibytes: int = 6) -> bytes:
    """Noise, and every third mebibyte left out."""
    numbers = Random(seed)
    return b"".join(bytes(MIB) if at % 3 == 1 else numbers.randbytes(MIB) for at in range(mebibytes)) + b"end" * 100


def usual_disks() -> dict[str, bytes]:
    """Made when they are asked for: constants would lie in each worker's memory as long as the suite runs."""
    return {"Ref:4": some_disk(1), "Ref:5": some_disk(2, 3)}


def exported(folder: Path, packing: str, disks: dict[str, bytes] | None = None, **changes: ova_xml_text.Value) -> Path:
    disks = disks or usual_disks()
    text = ova_xml_text.whole({key: len(disk) for key, disk in disks.items()}, **changes)
    plain = xva_archives.archive(folder / "web.xva", text, disks)
    return xva_archives.packed(plain, packing).rename(plain)


# ── what it is ───────────────────────────────────────────────────────────────────────────────────────────────────────


@both
@pytest.mark.parametrize("name", ["web.xva", "web.xva.gz", "web.xva.zst", "no name to know it by"])
def test_it_is_known_by_what_it_holds(packing: str, name: str, tmp_path: Path) -> None:
    path = exported(tmp_path, packing).rename(tmp_path / name)
    assert detect(path, tmp_path).kind == OfflineKind.XVA_ARCHIVE


@both
def test_other_packed_files_are_still_refused_by_name(packing: str, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.write_bytes(some_disk(3))
    ova = appliances.archive(tmp_path / "a.ova", {"a.ovf": appliances.description("cdrom_only")})
    for path in (disk, ova):
        with pytest.raises(UnsupportedFormat, match=f"is a {packing} file") as refused:
            detect(xva_archives.packed(path, packing), tmp_path)
        assert not isinstance(refused.value, UnknownKind)


@both
def test_one_that_is_cut_in_its_description_is_refused_by_name(packing: str, tmp_path: Path) -> None:
    path = exported(tmp_path, packing)
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(MalformedArchive, match=r"web\.xva is cut short: it ends within compressed data, at byte 300"):
        detect(path, tmp_path).inspect(path, tmp_path)


@both
def test_a_large_one_is_looked_into_and_not_unpacked(packing: str, tmp_path: Path) -> None:
    """A first disk of 20 MiB before the second: neither is read for the manifest."""
    path = exported(tmp_path, packing, {"Ref:4": Random(4).randbytes(20 * MIB), "Ref:5": some_disk(5, 2)})
    importer = detect(path, tmp_path)
    with bytes_read() as count:
        vm = importer.inspect(path, tmp_path)
    assert [disk.capacity_bytes for disk in vm.disks] == [20 * MIB, 2 * MIB + 300]
    assert count.bytes < 4 * MIB


@both
def test_a_description_behind_much_else_is_not_looked_for(packing: str, tmp_path: Path) -> None:
    """A bomb of gigabytes, or an archive packed again: it says how far was looked."""
    plain = tmp_path / "web.xva"
    with plain.open("wb") as file:
        for number in range(40):
            member = tarfile.TarInfo(f"Ref:4/{number:08d}")
            member.size = MIB
            file.write(member.tobuf() + bytes(MIB))
    path = xva_archives.packed(plain, packing).rename(plain)
    with pytest.raises(UnsupportedFormat, match=r"web\.xva: only the first 16777216 bytes that it holds are looked at"):
        detect(path, tmp_path).inspect(path, tmp_path)


@both
def test_a_guest_that_xapi_does_not_name_is_reported_by_its_partitions(packing: str, tmp_path: Path) -> None:
    types = (test_partitions.ESP, test_partitions.RESERVED, test_partitions.BASIC)
    raw = test_partitions.disk(tmp_path / "disk", "gpt", *types).read_bytes()
    path = exported(tmp_path, packing, {"Ref:4": raw, "Ref:5": bytes(2 * MIB)}, other_config={}, platform={})
    assert detect(path, tmp_path).inspect(path, tmp_path).guest_os.family == "windows"


@both
def test_a_packed_export_of_version_1_says_what_to_do(packing: str, tmp_path: Path) -> None:
    folder = appliances.folder(tmp_path / "old", geneva_exports.files({"sda": some_disk(6, 2)}))
    plain = tmp_path / "old.xva"
    subprocess.run(["tar", "-C", folder, "-cf", plain, "ova.xml", "sda"], check=True, timeout=60)
    path = xva_archives.packed(plain, packing).rename(plain)
    with pytest.raises(UnsupportedFormat, match=f"old.xva is a {packing} file of an export of version 1"):
        detect(path, tmp_path).inspect(path, tmp_path)


# ── whole jobs ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path, real_importers=True, workers=in_process)
    yield house
    house.close()


@pytest.fixture
def house_of_processes(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path, real_importers=True)
    yield house
    house.close()


def check_volumes(house: House, job: Migration, disks: dict[str, bytes]) -> None:
    assert job.state == State.COMPLETED, job.last_error
    for key, disk in disks.items():
        assert house.volume(job, key).read_bytes() == disk


def _kill_workers(store: Store, job: Migration, times: int, killed: list[int]) -> None:
    """Each once some of the first disk is durable, and more than when the one before it was killed."""
    deadline = time.monotonic() + 60
    while len(killed) < times and time.monotonic() < deadline:
        for worker in workers():
            marks = store.watermarks(job.id, 1)
            if worker not in killed and "Ref:4" in marks and marks["Ref:4"].offset_bytes > len(killed) * MIB:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker, signal.SIGKILL)
                    killed.append(worker)
        time.sleep(0.01)


@both
def test_a_killed_worker_goes_on_from_its_watermark(packing: str, house_of_processes: House) -> None:
    path = exported(house_of_processes.imports, packing)
    job = house_of_processes.intake.submit(offline_plan(path, kind="xva_archive", limits={"bandwidth_bps": 3 * MIB // 2}))
    killed: list[int] = []
    killer = threading.Thread(target=_kill_workers, args=(house_of_processes.store, job, 2, killed))
    killer.start()
    ended = house_of_processes.run(job.id)
    killer.join()
    assert len(killed) == 2
    check_volumes(house_of_processes, ended, usual_disks())
    assert workers() == []


@pytest.mark.slow
@pytest.mark.timeout(600)
@both
def test_a_crash_after_every_commit_is_survived(packing: str, tmp_path: Path) -> None:
    """One run, of which each commit leaves a copy to go on from."""
    disks, folder, hypervisor = usual_disks(), tmp_path / "house", FakeHypervisor()
    left: list[tuple[Path, FakeHypervisor]] = []

    def leave() -> None:
        copied = tmp_path / f"crash-{len(left)}"
        copy_as_killed(folder, copied)
        left.append((copied, deepcopy(hypervisor)))

    house = House(folder, hypervisor=hypervisor, real_importers=True, workers=in_process)
    job = house.intake.submit(offline_plan(exported(house.imports, packing, disks), kind="xva_archive"))
    house.store.on_commit = leave
    check_volumes(house, house.run(job.id), disks)
    house.close()
    assert len(left) > 4
    for copied, outlived in left:
        shutil.rmtree(folder)
        copied.rename(folder)
        again = House(folder, hypervisor=outlived, real_importers=True, workers=in_process)
        check_volumes(again, again.run(job.id), disks)
        again.close()


@both
@pytest.mark.parametrize("part", [0.5, 0.7, 0.999])
def test_a_truncated_archive_fails_the_job_and_leaves_nothing(packing: str, part: float, house: House) -> None:
    path = exported(house.imports, packing)
    os.truncate(path, int(path.stat().st_size * part))
    ended = house.run(house.intake.submit(offline_plan(path, kind="xva_archive")).id)
    assert ended.state == State.FAILED
    assert ended.last_error is not None
    assert ended.last_error.code == "E_MIG_MALFORMED_ARCHIVE"
    assert f"at byte {path.stat().st_size}" in ended.last_error.message
    assert house.leftovers() == []


@both
def test_one_that_is_cut_within_what_is_looked_at_is_refused_with_the_plan(packing: str, house: House) -> None:
    path = exported(house.imports, packing)
    os.truncate(path, MIB)
    with pytest.raises(MalformedArchive, match=f"at byte {MIB}$"):
        house.intake.submit(offline_plan(path, kind="xva_archive"))
    assert house.leftovers() == []
