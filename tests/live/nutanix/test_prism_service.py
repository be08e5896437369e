"""A Nutanix cluster as an operator meets it: `synvirt serve`, the command line, a certificate seen and pinned, read in the
cage that the service gives its workers; a guest that keeps writing, and boots here."""

import filecmp
import json
import os
import random
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from synvirt.cli.client import Client
from synvirt.model.job import Migration
from synvirt.model.kinds import State
from synvirt.model.plan import MigrationPlan
from synvirt.model.sources import Source
from tests.fakes.prism.server import PASSWORD, USER, Prisms
from tests.holding import files_that_hold
from tests.live.nutanix.test_prism_jobs import busy
from tests.real.guests import halting_linux
from tests.real.test_service import _guests, service
from tests.running import forked
from tests.running.processes import FILTERED, caged, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
MIB = 1 << 20


def finished(client: Client, job: Migration) -> Migration:
    until(lambda: client.migration(job.id).ended, 300)
    job = client.migration(job.id)
    assert job.state is State.COMPLETED, job.last_error
    return job


def test_from_an_unknown_certificate_to_a_moved_machine(tmp_path: Path, by_nfs: Prisms) -> None:
    """Warm by NFS. The guest writes all the while, its snapshots are removed by somebody, and the operator says when."""
    data_dir, state = tmp_path / "data", by_nfs.state

    def run(*arguments: str, typed: str = "", code: int = 0) -> str:
        argv = [sys.executable, "-m", "synvirt", "--data-dir", str(data_dir), *arguments]
        done = forked.run(argv, input=typed, capture_output=True, text=True, timeout=400, env=os.environ)
        assert done.returncode == code, done.stdout + done.stderr
        assert PASSWORD not in done.stdout + done.stderr
        return done.stdout

    raw = halting_linux(tmp_path / "web.raw")
    vm = state.add_vm("web-01", {"scsi.0": raw, "scsi.1": random.Random(1).randbytes(2 * MIB)})
    options = dict(by_nfs.access().options)
    chosen = [f"prism_element={by_nfs.url('element')}", *(f"{name}={options[name]}" for name in ("nfs_port", "mount_port"))]
    with (
        service(data_dir) as (process, client),
        busy(by_nfs, vm, "scsi.1", 2 * MIB) as written,
        caged(process.pid) as seen,
    ):
        add = ("sources", "add", "lab", by_nfs.url("central"), "--kind", "prism_api", "--source-user", USER)
        run(*add, *(word for one in chosen for word in ("--option", one)), typed=f"{PASSWORD}\n")
        first: dict[str, Any] = json.loads(run("sources", "test", "lab", "--json", code=1))
        shown = first["checks"][-1]
        assert (shown["name"], shown["ok"]) == ("certificate", False)
        assert [one for one in by_nfs.seen if "/vms" in one] == []  # a stranger gets no password
        fingerprint = re.findall(r"(?:[0-9A-F]{2}:){31}[0-9A-F]{2}", shown["hint"])[0]
        run("sources", "change", "lab", "--fingerprint", fingerprint, "--option", f"element_fingerprint_sha256={fingerprint}")
        reported = run("sources", "test", "lab", "--deep", "--vm", vm.id)
        assert "The source can be used." in reported
        assert "mover has the role Prism Admin" in reported
        assert by_nfs.names() == []
        assert "web-01" in run("sources", "vms", "lab")
        job = json.loads(run("import", "web-01", "--source", "lab", "--mode", "warm", "--cutover", "manual", "--json"))
        job_id = job["id"]
        try:
            until(lambda: len(client.migration(job_id).passes) > 1 or client.migration(job_id).ended, 300)
            with state.lock:
                for kept in list(state.kept.values()):
                    state.forget(kept)
            assert client.migration(job_id).state is not State.COMPLETED
            run("migrations", "cutover", job_id)
            ended = finished(client, client.migration(job_id))
        finally:
            # The guest outlives the service, as guests should: here nobody wants it.
            for pid in _guests(data_dir):
                os.kill(pid, signal.SIGKILL)
        assert (ended.mode_effective, ended.boot_sign) == ("Warm", "console")
        assert ended.last_error is None or ended.passes[-1].whole
        for moved, there in zip(sorted(ended.disks, key=lambda disk: disk.key), vm.disks, strict=True):
            assert moved.volume is not None
            assert filecmp.cmp(data_dir / "volumes" / moved.volume, state.path(there), shallow=False)
        assert written[0] > 0
        assert vm.power == "OFF"
        run("sources", "remove", "lab")
    assert FILTERED in seen
    assert by_nfs.names() == []
    log = (data_dir.parent / "serve.log").read_text()
    assert PASSWORD not in log
    assert files_that_hold(data_dir, PASSWORD) == []


def registered(client: Client, prisms: Prisms, *which: str, **options: Any) -> Source:
    access = prisms.access(*which, **options)
    request = {
        "name": "-".join(which) or "both",
        "kind": "prism_api",
        "endpoint": access.endpoint,
        "credentials": dict(access.credentials),
        "options": dict(access.options),
    }
    return Source.model_validate_json(client.ask("POST", "/sources", json=request))


@pytest.mark.parametrize(("way", "mode"), [("image", "Cold"), ("iscsi", "Warm")])
def test_other_ways_are_read_in_the_cage_too(
    tmp_path: Path, cluster: Prisms, request: pytest.FixtureRequest, way: str, mode: str
) -> None:
    """The guest writes until it is shut down."""
    data_dir, state = tmp_path / "data", cluster.state
    if way == "iscsi":
        request.getfixturevalue("by_iscsi")
    contents = {"scsi.0": random.Random(2).randbytes(4 * MIB), "sata.1": random.Random(3).randbytes(MIB)}
    vm = state.add_vm("db", contents)
    paths = dict(zip(contents, map(state.path, vm.disks), strict=True))
    with service(data_dir) as (process, client), busy(cluster, vm) as written, caged(process.pid) as seen:
        # What changed is told by the cluster itself, at its own port.
        source = registered(client, cluster, *(["central"] if way == "image" else []), transport=way)
        plan = {
            "source": {"Live": "prism_api"},
            "source_ref": {"kind": "live_vm", "source_id": str(source.id), "vm_id": vm.id},
            "mode": mode,
            "target": {"start": False},
            "limits": {"bandwidth_bps": 4 * MIB},  # its worker lives long enough to be looked at
        }
        job = finished(client, client.submit(MigrationPlan.model_validate(plan)))
        assert (job.mode_effective, job.last_error) == (mode, None)
        for disk in job.disks:
            assert disk.volume is not None
            assert (data_dir / "volumes" / disk.volume).read_bytes() == paths[disk.key].read_bytes()
        assert written[0] > 0
    assert FILTERED in seen
    assert cluster.names() == []
