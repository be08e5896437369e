"""A pool as an operator meets it: `synvirt serve`, the command line, a certificate seen and pinned; a guest that boots here."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from synvirt.sample import build
from tests.fakes.xenserver import PASSWORD, USER, xenserver
from tests.real.test_service import _guests, service

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_from_an_unknown_certificate_to_a_moved_machine(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"

    def run(*arguments: str, typed: str = "", code: int = 0) -> str:
        argv = [sys.executable, "-m", "synvirt", "--data-dir", str(data_dir), *arguments]
        done = subprocess.run(argv, input=typed, capture_output=True, text=True, timeout=400, env=os.environ)
        assert done.returncode == code, done.stdout + done.stderr
        assert PASSWORD not in done.stdout + done.stderr
        return done.stdout

    with xenserver(tmp_path / "pool") as platform:
        pool = platform.pool
        sample = build(tmp_path / "sample", payload_mib=8, keep_raw=True)
        assert sample.raw is not None
        machine = {"memory_static_max": 256 << 20, "VCPUs_at_startup": 1, "VCPUs_max": 1}
        vm_id = pool.add_vm("web-01", [sample.raw.read_bytes()], pool.add_store(), **machine)
        with service(data_dir):
            run("sources", "add", "lab", platform.url, "--kind", "xen_api", "--source-user", USER, typed=f"{PASSWORD}\n")
            first: dict[str, Any] = json.loads(run("sources", "test", "lab", "--json", code=1))
            shown = first["checks"][-1]
            assert (shown["name"], shown["ok"]) == ("certificate", False)
            assert pool.calls["session.login_with_password"] == 0  # a stranger gets no password
            fingerprint = re.findall(r"(?:[0-9A-F]{2}:){31}[0-9A-F]{2}", shown["hint"])[0]
            assert fingerprint == platform.fingerprint()
            run("sources", "change", "lab", "--fingerprint", fingerprint)
            assert "The source serves." in run("sources", "test", "lab", "--deep", "--vm", vm_id)
            assert "web-01" in run("sources", "vms", "lab")
            try:
                job = json.loads(run("import", "web-01", "--source", "lab", "--mode", "warm", "--wait", "--json"))
            finally:
                # The guest outlives the service, as guests should: here nobody wants it.
                for pid in _guests(data_dir):
                    os.kill(pid, signal.SIGKILL)
            assert (job["state"], job["mode_effective"], job["last_error"]) == ("Completed", "Warm", None)
            assert job["boot_sign"] == "agent"
            assert pool.tables["VM"][pool.vm(vm_id)]["power_state"] == "Halted"
            run("sources", "remove", "lab")
        assert (pool.snapshots(), pool.sessions) == ([], {})
    said = (data_dir.parent / "serve.log").read_text()
    kept = [path for path in data_dir.rglob("*") if path.is_file()]
    for secret in (PASSWORD, "session_id=", "OpaqueRef:"):
        assert secret not in said
        assert [path for path in kept if secret.encode() in path.read_bytes()] == []
