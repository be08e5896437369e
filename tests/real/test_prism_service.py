"""A Nutanix source as an operator meets it: the service in a process of its own, the command line, a guest that boots here."""

import filecmp
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.fakes.prism.lab import by_nfs, cluster
from tests.fakes.prism.server import PASSWORD, USER, Prisms
from tests.real.guests import halting_linux
from tests.real.test_service import _guests, service
from tests.running import forked

__all__ = ["by_nfs", "cluster"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_a_machine_is_moved_warm_and_boots_here(tmp_path: Path, by_nfs: Prisms) -> None:
    data_dir = tmp_path / "data"
    raw = halting_linux(tmp_path / "disk.raw")
    vm = by_nfs.state.add_vm("web", {"scsi.0": raw}, guest="Debian GNU/Linux 12")

    def run(*arguments: str, typed: str = "") -> str:
        argv = [sys.executable, "-m", "synvirt", "--data-dir", str(data_dir), *arguments]
        done = forked.run(argv, input=typed, capture_output=True, text=True, timeout=600, env=os.environ)
        assert done.returncode == 0, done.stdout + done.stderr
        assert PASSWORD not in done.stdout + done.stderr
        return done.stdout

    access = by_nfs.access()
    options = [part for name, value in access.options.items() for part in ("--option", f"{name}={value}")]
    with service(data_dir):
        add = ("sources", "add", "lab", access.endpoint, "--kind", "prism_api", "--source-user", USER)
        run(*add, *options, typed=f"{PASSWORD}\n")
        output = run("sources", "test", "lab", "--deep", "--vm", vm.id)
        assert "The source can be used." in output
        assert "NFS" in output
        assert "web" in run("sources", "vms", "lab")
        job = json.loads(run("import", "web", "--source", "lab", "--mode", "warm", "--memory", "256M", "--wait", "--json"))
        assert (job["state"], job["mode_effective"], job["last_error"]) == ("Completed", "Warm", None)
        assert job["boot_sign"] == "console"
        # The guest outlives the service, as guests should: here nobody wants it.
        (guest,) = _guests(data_dir)
        os.kill(guest, signal.SIGKILL)
    assert by_nfs.names() == []
    assert vm.power == "OFF"
    assert filecmp.cmp(data_dir / "volumes" / job["disks"][0]["volume"], raw, shallow=False)
    assert PASSWORD not in (data_dir.parent / "serve.log").read_text()
