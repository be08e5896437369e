"""A pool as an operator meets it: `synvirt serve`, the command line, a certificate seen and pinned; a guest that boots here."""

import filecmp
import json
import os
import random
import re
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from synvirt.model.kinds import Mode, State
from synvirt.model.plan import MigrationPlan
from tests.fakes.xenserver import PASSWORD, USER, xenserver
from tests.holding import files_that_hold
from tests.real.guests import halting_linux
from tests.real.test_service import _guests, service
from tests.running import forked
from tests.running.processes import until, workers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_from_an_unknown_certificate_to_a_moved_machine(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"

    def run(*arguments: str, typed: str = "", code: int = 0) -> str:
        argv = [sys.executable, "-m", "synvirt", "--data-dir", str(data_dir), *arguments]
        done = forked.run(argv, input=typed, capture_output=True, text=True, timeout=400, env=os.environ)
        assert done.returncode == code, done.stdout + done.stderr
        assert PASSWORD not in done.stdout + done.stderr
        return done.stdout

    with xenserver(tmp_path / "pool") as platform:
        pool = platform.pool
        raw = halting_linux(tmp_path / "web.raw")
        machine = {"memory_static_max": 256 << 20, "VCPUs_at_startup": 1, "VCPUs_max": 1}
        vm_id = pool.add_vm("web-01", [raw], pool.add_store(), **machine)
        with service(data_dir):
            run("sources", "add", "lab", platform.url, "--kind", "xen_api", "--source-user", USER, typed=f"{PASSWORD}\n")
            first: dict[str, Any] = json.loads(run("sources", "test", "lab", "--json", code=1))
            shown = first["checks"][-1]
            assert (shown["name"], shown["ok"]) == ("certificate", False)
            assert pool.calls["session.login_with_password"] == 0  # a stranger gets no password
            fingerprint = re.findall(r"(?:[0-9A-F]{2}:){31}[0-9A-F]{2}", shown["hint"])[0]
            assert fingerprint == platform.fingerprint()
            run("sources", "change", "lab", "--fingerprint", fingerprint)
            assert "The source can be used." in run("sources", "test", "lab", "--deep", "--vm", vm_id)
            assert "web-01" in run("sources", "vms", "lab")
            try:
                job = json.loads(run("import", "web-01", "--source", "lab", "--mode", "warm", "--wait", "--json"))
            finally:
                # The guest outlives the service, as guests should: here nobody wants it.
                for pid in _guests(data_dir):
                    os.kill(pid, signal.SIGKILL)
            assert (job["state"], job["mode_effective"], job["last_error"]) == ("Completed", "Warm", None)
            assert job["boot_sign"] == "console"
            assert filecmp.cmp(data_dir / "volumes" / job["disks"][0]["volume"], raw, shallow=False)
            assert pool.tables["VM"][pool.vm(vm_id)]["power_state"] == "Halted"
            run("sources", "remove", "lab")
        assert (pool.snapshots(), pool.sessions) == ([], {})
    log = (data_dir.parent / "serve.log").read_text()
    for secret in (PASSWORD, "session_id=", "OpaqueRef:"):
        assert secret not in log
        assert files_that_hold(data_dir, secret) == []


def test_a_service_killed_in_the_middle_moves_all_that_it_had_begun(tmp_path: Path) -> None:
    """Four VMs at once, in confined workers: warm by both ways of deltas, one of which loses its tracking while nobody looks;
    one without deltas, which is moved cold; one that was to be."""
    data_dir, generator = tmp_path / "data", random.Random(18)
    wished = {"nbd": "Warm", "export": "Warm", "downgraded": "Warm", "cold": "Cold"}
    with xenserver(tmp_path / "pool") as platform:
        pool = platform.pool
        store = pool.add_store()
        machine = {"memory_static_max": 256 << 20, "VCPUs_at_startup": 1, "VCPUs_max": 1}
        vms = {name: pool.add_vm(name, [generator.randbytes((8 << 20) + 512)], store, **machine) for name in wished}
        for vdi in pool.vdis(vms["downgraded"]):
            pool.tables["VDI"][vdi]["sm_config"]["image-format"] = "qcow2"

        def plan(name: str, source_id: str) -> MigrationPlan:
            return MigrationPlan.model_validate(
                {
                    "source": {"Live": "xen_api"},
                    "source_ref": {"kind": "live_vm", "source_id": source_id, "vm_id": vms[name]},
                    "mode": wished[name],
                    "warm": {"cutover": "manual" if name == "nbd" else "auto"},
                    "target": {"start": False, "name": name, "identity": "new"},
                    "limits": {"bandwidth_bps": 1 << 20},
                }
            )

        jobs: dict[str, UUID] = {}
        with service(data_dir) as (process, client):
            sources = {}
            for transport in ("auto", "export"):
                options = {"transport": transport, "fingerprint_sha256": platform.fingerprint()}
                request = {"name": transport, "kind": "xen_api", "endpoint": platform.url, "options": options}
                credentials = {"user": USER, "password": PASSWORD}
                made = client.ask("POST", "/sources", json={**request, "credentials": credentials})
                sources[transport] = json.loads(made)["id"]
            for name in wished:
                by = "auto" if name == "nbd" else "export"
                jobs[name] = client.submit(plan(name, sources[by])).id
            # A disk is copied in some seconds: its worker is looked at while the others begin, not after.
            confined: list[str] = []

            def all_begun() -> bool:
                for pid in workers(process.pid):
                    with suppress(OSError):  # it has ended meanwhile
                        confined.append(Path(f"/proc/{pid}/status").read_text())
                return all(client.migration(job).disks[0].bytes_done for job in jobs.values())

            until(all_begun, 240)
            assert any("NoNewPrivs:\t1" in one and "Seccomp:\t2" in one for one in confined), confined
            process.kill()
            process.wait(60)
        for name, vm_id in vms.items():
            pool.guest_writes(vm_id, 5 << 20, f"{name}: while the service was away".encode())
        pool.lose_tracking(vms["nbd"])
        with service(data_dir) as (_, client):
            client.cutover(jobs["nbd"])
            until(lambda: all(client.migration(job).ended for job in jobs.values()), 400)
            ended = {name: client.migration(job) for name, job in jobs.items()}
        assert {name: job.state for name, job in ended.items()} == dict.fromkeys(wished, State.COMPLETED), ended
        assert {name: job.mode_effective for name, job in ended.items()} == {
            "nbd": Mode.WARM, "export": Mode.WARM, "downgraded": Mode.COLD, "cold": Mode.COLD,
        }  # fmt: skip
        reported = {name: job.last_error.code for name, job in ended.items() if job.last_error is not None}
        assert reported["downgraded"] == "E_MIG_CBT_UNSUPPORTED"
        # A pass over whole disks repairs it. The job keeps showing it, if the guest was off meanwhile.
        (whole,) = [one.kind for one in ended["nbd"].passes if one.whole]
        assert reported.get("nbd") == ("E_MIG_CBT_RESET" if whole == "final" else None)
        for name, job in ended.items():
            (disk,) = job.disks
            assert disk.volume is not None
            assert (data_dir / "volumes" / disk.volume).read_bytes() == pool.disk(vms[name]).read_bytes(), name
        assert pool.snapshots() == []
        assert [one["uuid"] for one in pool.tables["VDI"].values() if one["cbt_enabled"] or one["other_config"]] == []
