"""virt-v2v and the tool of Hyper-V exports in their cage: a stand-in in their place that was taken over by what it read.

Their argv, environment and folders are made by the code that starts the real ones; that the real virt-v2v-in-place does its
work in this cage, appliance and all, show tests/real/test_windows.py and tests/real/test_wmi_service.py."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from synvirt.cage.appliance import converter
from synvirt.errors import DiskReadFailed, SynvirtError, V2vFailed
from synvirt.guests.virt_v2v import VirtV2vInPlace
from synvirt.offline.hyperv.tool import VmcxTool
from tests.cage.test_cage import needs
from tests.guests.conversions import KVM, NAME, manifest
from tests.running.processes import children, until

# `own`: the disk or export that it is given. `work`: a folder that is its own. `secret`: another job's file.
MISBEHAVIOUR = {
    "reads the password hashes": "open('/etc/shadow').read()",
    "reads another job's file": "open('{secret}').read()",
    "writes to what it reads": "open('{own}', 'r+')",
    "writes beside its folders": "open('{secret}.new', 'w')",
    "connects out": "socket.create_connection(('127.0.0.1', 9), 1)",
    "listens": "socket.socket(socket.AF_INET).bind(('127.0.0.1', 0))",
    "ends the service": "os.kill({service}, 9)",
    "becomes root": "os.setuid(0)",
    "gets into a namespace": "ctypes.CDLL(None, use_errno=True).unshare(0x10000000) and os.chroot('/proc')",
    "mounts": "ctypes.CDLL(None).mount(b'none', b'/tmp', b'tmpfs', 0, 0) and os.chroot('/proc')",
    "has its child do it": "subprocess.run(['cat', '/etc/shadow'], check=True)",
}
STAND_IN = """#!{python} -IS
import ctypes, os, socket, subprocess, sys
if "--machine-readable" in sys.argv[1:2]:
    sys.exit("input:hyperv")
open({log!r}, "a").write(str(os.getuid()))
{does}
"""


class Lab:
    """`volume`: a volume, or an export, that the tool is given."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.volume, self.secret = folder, folder / "given" / "disk.raw", folder / "other" / "secret"
        for path in (self.volume, self.secret):
            path.parent.mkdir()
            path.write_bytes(bytes(1 << 20))
        (folder / "bin").mkdir()
        (folder / "iso").mkdir()

    def install(self, does: str) -> str:
        """As virt-v2v-in-place; what it did before it misbehaved lies in its folder."""
        tool = self.folder / "bin" / "virt-v2v-in-place"
        tool.write_text(STAND_IN.format(python="/usr/bin/python3", log="/dev/null", does=does))
        tool.chmod(0o755)
        return str(tool)

    def convert(self, stop: Callable[[], bool] = lambda: False) -> None:
        preparer = VirtV2vInPlace(self.folder / "conversions", self.folder / "iso", self.folder / "none", kvm=KVM)
        try:
            preparer.convert(NAME, manifest(), [str(self.volume)], lambda kind, text: None, stop)
        finally:
            preparer.discard(NAME)

    def import_whole(self, command: str, reads: tuple[Path, ...] = ()) -> Path:
        tool = VmcxTool(self.folder / "out", "tool", command, arguments="x {source} {folder}", timeout_s=60, reads=reads)
        tool.import_into("job", self.volume.parent, 1, lambda part: None, lambda: False)
        return self.folder / "out" / "job"


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    needs("landlock", "seccomp")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return Lab(tmp_path)


def test_an_export_that_is_a_link_by_now_is_not_read(lab: Lab) -> None:
    """What the tool may read is what was looked at: who may write in the import root may make a link of it meanwhile."""
    reads = lab.install("import glob; open(sys.argv[3] + '/web.raw', 'w').write(str(glob.glob(sys.argv[2] + '/*')))")
    assert "disk.raw" in (lab.import_whole(reads) / "web.raw").read_text()
    lab.volume.parent.rename(lab.folder / "before")
    lab.volume.parent.symlink_to(lab.secret.parent)
    assert (lab.import_whole(reads) / "web.raw").read_text() == "[]"


def refused(error: SynvirtError) -> bool:
    return any(word in error.detail for word in ("denied", "not permitted", "Error"))


@pytest.mark.parametrize("name", MISBEHAVIOUR)
def test_a_converter_that_misbehaves_fails_and_its_failure_is_ours(name: str, lab: Lab) -> None:
    before = lab.volume.read_bytes()
    command = lab.install(MISBEHAVIOUR[name].format(own=lab.volume, secret=lab.secret, service=os.getpid()))
    with pytest.raises(V2vFailed) as converting:
        lab.convert()
    with pytest.raises(DiskReadFailed) as importing:
        lab.import_whole(command)
    assert (converting.value.code, importing.value.code) == ("E_MIG_V2V_FAILED", "E_MIG_DISK_READ_FAILED")
    assert refused(converting.value), converting.value.detail
    assert refused(importing.value), importing.value.detail
    assert lab.volume.read_bytes() == before
    assert not lab.secret.with_name("secret.new").exists()


def test_it_does_its_work_as_another_user_who_reaches_no_libvirtd(lab: Lab) -> None:
    writes = "import glob; open(sys.argv[3] + '/web.raw', 'w').write(open(glob.glob(sys.argv[2] + '/*')[0]).read())"
    made = lab.import_whole(lab.install(writes))
    assert (made / "web.raw").read_bytes() == lab.volume.read_bytes()
    if os.getuid() == 0:
        assert (made / "web.raw").stat().st_uid != 0
    lab.secret.write_text("licence")
    licensed = lab.install(f"open(sys.argv[3] + '/web.raw', 'w').write(open({str(lab.secret)!r}).read())")
    with pytest.raises(DiskReadFailed):
        lab.import_whole(licensed)
    assert (lab.import_whole(licensed, reads=(lab.secret,)) / "web.raw").read_text() == "licence", "by vmcx_tool_reads"


@pytest.mark.parametrize("how", ["it ends", "it fails", "it is cancelled"])
def test_its_daemons_end_with_it_though_they_are_another_users(lab: Lab, how: str) -> None:
    """As qemu-nbd of virt-v2v is one: in a session of its own, and its parent is gone."""
    marker = lab.folder.name + how.replace(" ", "-")
    ends = {"it ends": "", "it fails": "sys.exit('odd')", "it is cancelled": "import time; time.sleep(600)"}[how]
    shell = f"os.execv('/bin/sh', ['sh', '-c', ': {marker}; sleep 600; :'])"
    daemon = f"if os.fork() == 0:\n os.setsid()\n if os.fork() == 0: {shell}\n os._exit(0)"
    lab.install(f"{daemon}\nimport time; time.sleep(0.5)\n{ends}")

    def daemons() -> list[str]:
        return [command for command in children(1).values() if f": {marker};" in command and "virt-v2v" not in command]

    fails = contextlib.nullcontext() if how == "it ends" else pytest.raises(SynvirtError)
    with fails:
        lab.convert(stop=lambda: how == "it is cancelled" and bool(daemons()))
    until(lambda: not daemons())


def test_the_volumes_are_read_and_the_overlays_written(tmp_path: Path) -> None:
    argv = converter(["cat"], reads=["/dev/zvol/a"], writes=["/var/lib/x/job"], environment={"LIBGUESTFS_CACHEDIR": "/c"})
    description = argv[argv.index("cat") - 1]
    assert '"writes": ["/c", "/dev/kvm", "/var/lib/x/job"]' in description
    assert '"/dev/zvol/a"]' in description
    assert '"network": "LOCAL"' in description
    assert '"as_root": false' in description
