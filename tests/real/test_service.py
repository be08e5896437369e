"""The whole product as a user runs it: `synvirt serve` in a process of its own, a real OVA, real libvirt and QEMU, kill -9."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from synvirt.cli.client import Client
from synvirt.errors import Conflict
from synvirt.model.job import Migration
from synvirt.model.kinds import State
from synvirt.model.plan import MigrationPlan
from synvirt.sample import Sample
from tests.real.conftest import built_once
from tests.running import forked
from tests.running.processes import children, command_line, until, workers

SYNVIRT = [sys.executable, "-m", "synvirt"]
DOCS = Path(__file__).parent.parent.parent / "docs"


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    return built_once(tmp_path_factory, 24)


@contextmanager
def service(data_dir: Path, *program: str) -> Iterator[tuple[subprocess.Popen[bytes], Client]]:
    """`synvirt serve`, answering; ended with SIGTERM, as a supervisor does. `program`: a module that runs it, and its first
    arguments."""
    log_file = data_dir.parent / "serve.log"
    with log_file.open("wb") as log:
        argv = [sys.executable, "-m", *(program or ("synvirt",))]
        argv += ["serve", "--data-dir", str(data_dir), "--listen", "127.0.0.1:0"]
        process: subprocess.Popen[bytes] = forked.Popen(argv, stdout=log, stderr=log)
    try:
        until(lambda: "SynVirt serves at" in log_file.read_text() or process.poll() is not None)
        assert process.poll() is None, log_file.read_text()[-3000:]
        with Client.local(data_dir / "synvirt.sock") as client:
            yield process, client
    finally:
        process.terminate()
        process.wait(60)


def ended(client: Client, job: Migration) -> Migration:
    until(lambda: client.migration(job.id).ended, 240)
    return client.migration(job.id)


@pytest.fixture
def data_dir(tmp_path: Path, sample: Sample) -> Iterator[Path]:
    data_dir = tmp_path / "data"
    (data_dir / "imports").mkdir(parents=True)
    os.link(sample.ova, data_dir / "imports" / "a.ova")
    yield data_dir
    # The embedded driver's guests outlive the service, as guests should: here nobody wants them.
    for pid in _guests(data_dir):
        os.kill(pid, signal.SIGKILL)


def _guests(data_dir: Path) -> list[int]:
    return [
        int(entry.name)
        for entry in Path("/proc").glob("[0-9]*")
        if (command := command_line(int(entry.name))).startswith(("/usr/bin/qemu-system", "qemu-system"))
        and str(data_dir) in command
    ]


def plan(data_dir: Path, *, start: bool = True, **fields: object) -> MigrationPlan:
    return MigrationPlan.model_validate(
        {
            "source": {"Offline": "ova_archive"},
            "source_ref": {"kind": "offline_host_path", "path": str(data_dir / "imports" / "a.ova")},
            "mode": "Cold",
            "target": {"start": start},
            **fields,
        }
    )


def volumes(data_dir: Path) -> list[Path]:
    return list((data_dir / "volumes").rglob("*.raw"))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_killed_service_brings_the_guest_home_nevertheless(data_dir: Path, sample: Sample) -> None:
    with service(data_dir) as (process, client):
        # Slow enough that there is a middle to be killed in.
        job = client.submit(plan(data_dir, limits={"bandwidth_bps": 12 << 20}))
        until(lambda: client.migration(job.id).progress.bytes_done > 0)
        process.kill()
        process.wait()
        until(lambda: not any("synvirt.worker" in command for command in children(1).values() if str(data_dir) in command))
    with service(data_dir) as (process, client):
        last = ended(client, job)
        assert last.state == State.COMPLETED, last.last_error
        assert last.boot_sign == "agent"
        assert len(_guests(data_dir)) == 1
        process.kill()
        process.wait()
    # The guest runs on without its service, and is found again.
    assert len(_guests(data_dir)) == 1
    with service(data_dir) as (_, client), pytest.raises(Conflict, match="has the name of the guest"):
        client.submit(plan(data_dir))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_byte_arrives_and_a_killed_worker_goes_on(data_dir: Path, sample: Sample) -> None:
    with service(data_dir) as (process, client):
        job = client.submit(plan(data_dir, start=False, limits={"bandwidth_bps": 12 << 20}))
        until(lambda: client.migration(job.id).progress.bytes_done > 0 and workers(process.pid))
        os.kill(workers(process.pid)[0], signal.SIGKILL)
        last = ended(client, job)
        assert last.state == State.COMPLETED, last.last_error
        assert sample.raw is not None
        [volume] = volumes(data_dir)
        subprocess.run(["cmp", sample.raw, volume], check=True)
        assert volume.stat().st_blocks * 512 < volume.stat().st_size


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_damaged_volume_is_repaired_as_the_document_says_through_a_kill(
    data_dir: Path, sample: Sample, tmp_path: Path
) -> None:
    """docs/receipts.md, its lines run by a shell; the service is killed in the middle of the first repair."""
    assert sample.raw is not None
    with service(data_dir) as (process, client):
        job = ended(client, client.submit(plan(data_dir, start=False)))
        assert job.state == State.COMPLETED, job.last_error
        [volume] = volumes(data_dir)
        with volume.open("r+b") as file:
            for at in range(0, volume.stat().st_size, 1 << 20):
                file.seek(at + 12345)
                file.write(b"damage")
        looked, repaired = re.findall(r"^    (synvirt migrations repair .*)$", (DOCS / "receipts.md").read_text(), re.MULTILINE)
        seen = _run(data_dir, tmp_path, looked.replace("1f3a", str(job.id)[:8]))
        assert seen.returncode == 1, seen.stderr
        assert "bytes at 0: differs from the receipt" in seen.stdout
        repairing = Migration.model_validate_json(client.ask("POST", f"/migrations/{job.id}/repair"))
        until(lambda: _differs(client.migration(repairing.id)))
        process.kill()
        process.wait()
        until(lambda: not any("synvirt.worker" in command for command in children(1).values() if str(data_dir) in command))
    with service(data_dir) as (_, client):
        last = ended(client, repairing)
        assert last.state == State.COMPLETED, last.last_error
        assert last.repair is not None
        [disk] = last.repair.disks
        assert (disk.differs[0].start, disk.left) == (0, ())
        subprocess.run(["cmp", sample.raw, volume], check=True)
        again = _run(data_dir, tmp_path, repaired.replace("1f3a", str(job.id)[:8]))
        assert again.returncode == 0, again.stderr
        assert "holds what the receipt says" in again.stdout


def _differs(job: Migration) -> bool:
    return job.ended or (job.repair is not None and any(disk.differs for disk in job.repair.disks))


def _run(data_dir: Path, folder: Path, line: str) -> subprocess.CompletedProcess[str]:
    return forked.in_shell(line, folder, timeout=200, SYNVIRT_DATA_DIR=str(data_dir))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_cancel_leaves_no_volume_process_or_domain(data_dir: Path) -> None:
    with service(data_dir) as (process, client):
        job = client.submit(plan(data_dir, limits={"bandwidth_bps": 4 << 20}))
        until(lambda: client.migration(job.id).progress.bytes_done > 0)
        client.cancel(job.id)
        last = ended(client, job)
        assert (last.state, last.last_error and last.last_error.code) == (State.CANCELLED, "E_MIG_CANCELLED")
        assert volumes(data_dir) == []
        assert workers(process.pid) == []
        assert _guests(data_dir) == []
        with pytest.raises(Conflict):
            client.cancel(job.id)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_cancel_while_the_guest_boots_leaves_nothing(data_dir: Path) -> None:
    with service(data_dir) as (_, client):
        job = client.submit(plan(data_dir))
        until(lambda: _guests(data_dir))
        client.cancel(job.id)
        assert ended(client, job).state == State.CANCELLED
        until(lambda: _guests(data_dir) == [])
        assert volumes(data_dir) == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_demo_ends_by_itself_and_tidies_up(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    demo = subprocess.run(
        [*SYNVIRT, "demo", "--data-dir", data_dir, "--payload-mib", "8"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert demo.returncode == 0, demo.stdout + demo.stderr
    assert "The guest answers: it runs from its new disk" in demo.stdout
    for state in ("Queued", "CopyingFull", "Starting", "Completed"):
        assert state in demo.stdout
    assert not re.search(r" (info|warning|error) : ", demo.stdout + demo.stderr), "libvirt's own log is no news to a user"
    assert volumes(data_dir) == []
    assert list((data_dir / "imports").glob("*.ova")) == []
    assert _guests(data_dir) == []


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("moment", ["Making a sample", "Submitted", "CopyingFull", "Starting"])
def test_a_demo_that_is_interrupted_leaves_nothing(moment: str, tmp_path: Path) -> None:
    """Ctrl-C goes to the whole group, as a terminal sends it."""
    data_dir, printed = tmp_path / "data", tmp_path / "printed"
    argv = [*SYNVIRT, "demo", "--data-dir", str(data_dir), "--payload-mib", "8", "--listen", "127.0.0.1:0"]
    with printed.open("w") as out:
        demo: subprocess.Popen[bytes] = forked.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
    try:
        until(lambda: moment in printed.read_text() or demo.poll() is not None)
        heeds = re.findall(r"^Sig\w+:.*", Path(f"/proc/{demo.pid}/status").read_text(), re.MULTILINE)
        os.killpg(demo.pid, signal.SIGINT)
        assert demo.wait(timeout=120) == 130, (heeds, printed.read_text())
    finally:
        if demo.poll() is None:
            os.killpg(demo.pid, signal.SIGKILL)
    *_, last = printed.read_text().splitlines()
    assert last == "Interrupted: no guest, volume or job of the demonstration is left"
    assert "Traceback" not in printed.read_text()
    assert list((data_dir / "imports").glob("*.ova")) == []
    assert not (data_dir / "volumes").exists() or volumes(data_dir) == []
    assert _guests(data_dir) == []


def test_two_services_do_not_share_a_folder(data_dir: Path) -> None:
    with service(data_dir):
        second = forked.run([*SYNVIRT, "serve", "--data-dir", data_dir], capture_output=True, text=True, timeout=120)
        assert second.returncode == 1
        assert "E_MIG_CONFLICT" in second.stderr
        assert "Traceback" not in second.stderr


def test_the_folder_has_the_modes_of_the_specification(data_dir: Path) -> None:
    with service(data_dir):
        modes = {
            "imports": 0o750,
            "keyring": 0o700,
            "keyring/migrator.key": 0o600,
            "keyring/users": 0o600,
            "synvirt.sock": 0o600,
        }
        assert {name: (data_dir / name).stat().st_mode & 0o777 for name in modes} == modes
        assert (data_dir / "keyring/migrator.key").stat().st_size == 32
        assert (data_dir / "migrator.db").exists()


def test_what_json_prints_is_what_the_service_answers(data_dir: Path) -> None:
    with service(data_dir) as (_, client):
        job = client.submit(plan(data_dir, start=False))
        ended(client, job)
        argv = [*SYNVIRT, "migrations", "show", str(job.id), "--json", "--data-dir", str(data_dir)]
        printed = forked.run(argv, capture_output=True, text=True, timeout=120).stdout
        assert json.loads(printed) == json.loads(client.ask("GET", f"/migrations/{job.id}"))
