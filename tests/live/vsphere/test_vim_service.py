"""vSphere as an operator meets it: `synvirt serve` in a process of its own, the command line, VMware's own simulator."""

import json
import os
import random
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.vcenter import PASSWORD, USER, VCenter
from tests.holding import files_that_hold
from tests.real.test_service import service
from tests.running import forked

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_from_an_unknown_certificate_to_a_moved_machine(tmp_path: Path, platform: VCenter) -> None:
    data_dir = tmp_path / "data"
    disk = platform.add_disk("vm-57", random.Random(1).randbytes(2 << 20))

    def run(*arguments: str, typed: str = "", code: int = 0) -> str:
        argv = [sys.executable, "-m", "synvirt", "--data-dir", str(data_dir), *arguments]
        done = forked.run(argv, input=typed, capture_output=True, text=True, timeout=120, env=os.environ)
        assert done.returncode == code, done.stdout + done.stderr
        assert PASSWORD not in done.stdout + done.stderr
        return done.stdout

    with service(data_dir):
        add = ("sources", "add", "lab", platform.url, "--kind", "vim_api", "--source-user", USER)
        run(*add, typed=f"{PASSWORD}\n")
        first: dict[str, Any] = json.loads(run("sources", "test", "lab", "--json", code=1))
        shown = first["checks"][-1]
        assert (shown["name"], shown["ok"]) == ("certificate", False)
        assert platform.calls("Login") == 0  # a stranger gets no password
        fingerprint = re.findall(r"(?:[0-9A-F]{2}:){31}[0-9A-F]{2}", shown["hint"])[0]
        assert fingerprint.replace(":", "") == platform.fingerprint
        run("sources", "change", "lab", "--fingerprint", fingerprint)
        assert "The source can be used." in run("sources", "test", "lab", "--deep", "--vm", "vm-57")
        assert "DC0_H0_VM0" in run("sources", "vms", "lab")
        meant = ("waves", "select", "night", "--source", "lab", "--folder", "dc0", "--host", "DC0_H0", "--power", "on")
        assert "would have 1 member" in run(*meant, "--vm", "DC0_H0_*0", "--dry-run")
        run("sources", "test", "lab")  # a shallow test leaves the rates that the deep one measured
        reported = run("import", "DC0_H0_VM0", "--source", "lab", "--mode", "warm", "--dry-run")
        assert "read by datastore" in reported
        assert "the last deep test of the source: datastore" in reported
        run("keyring", "rotate")
        job = json.loads(run("import", "DC0_H0_VM0", "--source", "lab", "--mode", "warm", "--no-start", "--wait", "--json"))
        assert (job["state"], job["mode_effective"], job["last_error"]) == ("Completed", "Warm", None)
        assert [one["kind"] for one in job["passes"]] == ["full", "delta", "final"]
        assert (data_dir / "volumes" / job["disks"][0]["volume"]).read_bytes() == disk.read_bytes()
        run("sources", "remove", "lab")
    assert platform.snapshots() == []
    assert platform.sessions() == 0
    log = (data_dir.parent / "serve.log").read_text()
    assert PASSWORD not in log
    assert files_that_hold(data_dir, PASSWORD) == []
