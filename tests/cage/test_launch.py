"""Outside programs that read what strangers made, each started in a cage: one that misbehaves on purpose, and real ones."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from synvirt.cage import Cage, Network
from synvirt.cage.launch import argv_in, image_tool
from synvirt.errors import V2vFailed
from synvirt.guests import overlays
from synvirt.programs import ProgramFailed, run
from tests.cage.test_cage import needs

# The call's number on x86_64, and its flag for a namespace of users (sched.h).
CLONE, CLONE_NEWUSER = 56, 0x10000000
# A program that was taken over by what it read, as a tool of another language would be: nothing of ours runs in it.
MISBEHAVIOUR = {
    "reads the password hashes": "open('/etc/shadow').read()",
    "reads beside its file": "open('{folder}/secret').read()",
    "writes to what it reads": "open('{folder}/own', 'r+')",
    "writes elsewhere": "open('/tmp/out-of-the-cage', 'w')",
    "connects out": "__import__('socket').create_connection(('127.0.0.1', 9), 1)",
    "connects to a daemon of the host": "__import__('socket').socket(1).connect('/run/dbus/system_bus_socket')",
    "takes 16 GiB": "bytearray(16 << 30)",
    "ends the service": "os.kill({service}, 9)",
    "gets more rights": "os.setuid(0) or open('/etc/shadow')",
    "has its child do it": "__import__('subprocess').run(['cat', '/etc/shadow'], check=True)",
    "has all rights in a namespace of its own": (
        f"__import__('ctypes').CDLL(None).syscall({CLONE}, {CLONE_NEWUSER | signal.SIGCHLD}, 0, 0, 0, 0) < 0 and os.chroot('/')"
    ),
    "mounts": "__import__('ctypes').CDLL(None).mount(b'none', b'/tmp', b'tmpfs', 0, 0) and 1 / 0",
}


@pytest.mark.parametrize("name", MISBEHAVIOUR)
def test_a_program_that_misbehaves_fails_and_its_failure_is_ours(name: str, tmp_path: Path) -> None:
    needs("landlock", "seccomp")
    (tmp_path / "own").write_text("image")
    (tmp_path / "secret").write_text("of another job")
    does = MISBEHAVIOUR[name].format(folder=tmp_path, service=os.getpid())
    argv = ["/usr/bin/python3", "-I", "-S", "-c", f"import os; {does}"]
    caged = argv_in(Cage(reads=(str(tmp_path / "own"),), memory_bytes=2 << 30), argv)
    with pytest.raises(ProgramFailed) as caught:
        run(caged, timeout_s=60)
    assert caught.value.code == "E_MIG_INTERNAL"
    assert any(word in caught.value.stderr for word in ("Error", "denied", "not permitted")), caught.value.stderr


def test_one_that_loops_is_ended(tmp_path: Path) -> None:
    spins = ["/usr/bin/python3", "-I", "-S", "-c", "while True: pass"]
    with pytest.raises(ProgramFailed):
        run(argv_in(Cage(cpu_s=1), spins), timeout_s=120)
    with pytest.raises(ProgramFailed, match="took too long"):
        run(argv_in(Cage(), spins), timeout_s=1)


def test_what_it_may_it_does(tmp_path: Path) -> None:
    (tmp_path / "own").write_text("image")
    (tmp_path / "own").chmod(0o600)
    reads = Cage(reads=(str(tmp_path / "own"),), network=Network.NONE)
    assert run(argv_in(reads, ["cat", str(tmp_path / "own")]), timeout_s=60).stdout == "image"


def test_a_conversions_changes_are_laid_and_taken_over_by_tools_in_a_cage(tmp_path: Path) -> None:
    volume, folder = tmp_path / "volumes" / "disk.raw", tmp_path / "conversions" / "job"
    volume.parent.mkdir()
    volume.write_bytes(b"before".ljust(1 << 20, b"\0"))
    volume.chmod(0o640)
    (laid,) = overlays.lay(folder, [str(volume)], {})
    subprocess.run(["qemu-io", "-f", "qcow2", "-c", "write -P 0x61 0 512", str(laid)], check=True, capture_output=True)
    assert volume.read_bytes()[:6] == b"before", "an overlay keeps what is written"
    overlays.take_over(folder, [str(volume)], {})
    overlays.take_over(folder, [str(volume)], {})
    assert volume.read_bytes()[:512] == b"a" * 512
    overlays.remove(folder)


def test_a_conversion_of_an_overlay_leaves_the_volume_under_it(tmp_path: Path) -> None:
    volume, clone, folder = tmp_path / "disk.raw", tmp_path / "clone.raw", tmp_path / "conversions" / "job"
    volume.write_bytes(b"before".ljust(1 << 20, b"\0"))
    lay = ["qemu-img", "create", "-q", "-f", "qcow2", "-F", "raw", "-b", str(volume), str(clone)]
    subprocess.run(lay, check=True, capture_output=True)
    backing = {str(clone): str(volume)}
    (laid,) = overlays.lay(folder, [str(clone)], backing)
    subprocess.run(["qemu-io", "-f", "qcow2", "-c", "write -P 0x61 0 512", str(laid)], check=True, capture_output=True)
    overlays.take_over(folder, [str(clone)], backing)
    overlays.take_over(folder, [str(clone)], backing)
    overlays.remove(folder)
    assert volume.read_bytes() == b"before".ljust(1 << 20, b"\0")
    convert = ["qemu-img", "convert", "-f", "qcow2", "-O", "raw", str(clone), str(tmp_path / "seen")]
    subprocess.run(convert, check=True, capture_output=True)
    assert (tmp_path / "seen").read_bytes() == (b"a" * 512).ljust(1 << 20, b"\0")


def test_an_overlay_that_names_another_file_does_not_have_it(tmp_path: Path) -> None:
    """What wrote into it may have changed what it lies over: `commit` would write there."""
    needs("landlock")
    volume, other, folder = tmp_path / "disk.raw", tmp_path / "other.raw", tmp_path / "job"
    for path in (volume, other):
        path.write_bytes(bytes(1 << 20))
    (laid,) = overlays.lay(folder, [str(volume)], {})
    subprocess.run(["qemu-io", "-f", "qcow2", "-c", "write -P 0x61 0 512", str(laid)], check=True, capture_output=True)
    rebase = ["qemu-img", "rebase", "-u", "-f", "qcow2", "-F", "raw", "-b", str(other), str(laid)]
    subprocess.run(rebase, check=True, capture_output=True)
    with pytest.raises(V2vFailed, match="qemu-img ended with 1"):
        overlays.take_over(folder, [str(volume)], {})
    assert other.read_bytes() == bytes(1 << 20)


def test_a_disk_in_a_pool_takes_a_network_and_its_settings() -> None:
    argv = image_tool(["qemu-img", "info"], writes=["/o/0.qcow2", "rbd:p/i:id=admin:conf=/etc/ceph/ceph.conf"])
    assert argv[0] == sys.executable
    fields = json.loads(argv[argv.index("qemu-img") - 1])
    assert fields["network"] == "ANY"
    assert fields["reads"] == ["/etc/ceph"]
    assert fields["writes"] == ["/o/0.qcow2"]


def test_a_launch_runs_no_code_of_its_environment_or_its_folder(tmp_path: Path) -> None:
    for name in ("sitecustomize", "usercustomize", "json", "ctypes", "synvirt"):
        (tmp_path / f"{name}.py").write_text("import os; os._exit(66)")
    argv = argv_in(Cage(), ["true"])
    done = subprocess.run(argv, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)}, timeout=60, check=False)
    assert done.returncode == 0
