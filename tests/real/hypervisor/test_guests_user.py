"""Where the service is root, guests are not: what QEMU's process may do, seen in /proc, and what it is given and gives back."""

import os
import pwd
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import pytest

from synvirt.hypervisor import Volume
from synvirt.hypervisor.libvirt_host import LibvirtHost
from synvirt.kvm import qemu_user
from synvirt.kvm.qemu_user import QemuUser
from synvirt.migrations.landing import machine_of
from synvirt.model.machine import Disk, VmManifest
from synvirt.sizes import MIB
from tests.contracts.hypervisors import job
from tests.needs import need, need_root
from tests.running import forked
from tests.running.processes import guests_of

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="as another user than root, guests run as that user")


@pytest.fixture
def user(host: LibvirtHost) -> QemuUser:
    need_root("guests of a user of their own")
    found = qemu_user.of(host._connection.uri)
    assert found is not None, "apt-get install libvirt-daemon-system"
    return found


def volume(folder: Path, name: str) -> Path:
    """As the folder's destination makes one: closed to all others, and so is the folder that it lies in."""
    folder.mkdir(exist_ok=True)
    folder.chmod(0o750)
    path = folder / f"{name}.raw"
    with path.open("wb") as file:
        file.truncate(MIB)
        file.write(b"secret of " + name.encode())
    path.chmod(0o640)
    return path


def defined(host: LibvirtHost, name: str, path: Path, device: str = "file", **more: object) -> UUID:
    disks = (Disk(key="disk1", label="disk1", capacity_bytes=MIB),)
    manifest = VmManifest.model_validate({"vm_id": name, "name": name, "memory_bytes": 256 * MIB, "disks": disks, **more})
    domain = host.domain_xml(machine_of(job(manifest)), [Volume("disk1", str(path), device)])
    host.define(domain)
    return UUID(domain.uuid)


def process_of(uuid: UUID) -> Path:
    """QEMU's, by the UUID in its arguments."""
    found = guests_of(uuid)
    assert found, f"no QEMU of {uuid} runs"
    return Path(f"/proc/{found[0]}")


def status(process: Path) -> dict[str, list[str]]:
    lines = (line.partition(":") for line in (process / "status").read_text().splitlines())
    return {name: value.split() for name, _, value in lines}


def as_user(user: QemuUser, does: str) -> str:
    """What a program is told that has become that user, with all its groups: as whoever took over its QEMU would be."""
    ran = subprocess.run(
        [sys.executable, "-I", "-c", textwrap.dedent(does)],
        user=user.uid, group=user.gid, extra_groups=user.groups, cwd="/",
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    return ran.stdout.strip() or ran.stderr.strip().rpartition("\n")[2]


def reading(path: Path) -> str:
    return f"print(open({str(path)!r}, 'rb').read(16))"


def test_its_process_is_no_root_and_in_a_sandbox(host: LibvirtHost, user: QemuUser, tmp_path: Path) -> None:
    uuid = defined(host, "caged", volume(tmp_path / "volumes", "caged"))
    host.start(uuid)
    process = process_of(uuid)
    found = status(process)
    assert found["Uid"] == [str(user.uid)] * 4
    assert "0" not in (*found["Gid"], *found["Groups"])
    assert {name: int(found[name][0], 16) for name in ("CapPrm", "CapEff", "CapInh", "CapAmb")} == dict.fromkeys(
        ("CapPrm", "CapEff", "CapInh", "CapAmb"), 0
    )
    assert (found["Seccomp"], found["NoNewPrivs"]) == (["2"], ["1"])
    arguments = (process / "cmdline").read_bytes().split(b"\0")
    sandbox = arguments[arguments.index(b"-sandbox") + 1]
    assert sandbox == b"on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"


def test_a_volume_is_its_guests_while_it_runs_and_ours_after(host: LibvirtHost, user: QemuUser, tmp_path: Path) -> None:
    path = volume(tmp_path / "volumes", "lent")
    uuid = defined(host, "lent", path)
    host.start(uuid)
    lent = path.stat()
    assert (lent.st_uid, lent.st_gid, lent.st_mode & 0o777) == (user.uid, user.gid, 0o640)
    # Another may pass the folder, and not see what is in it.
    assert path.parent.stat().st_mode & 0o777 == 0o751
    host.undefine(uuid, uuid)
    back = path.stat()
    assert (back.st_uid, back.st_gid, back.st_mode & 0o777) == (0, 0, 0o640)


def test_a_taken_over_guest_reads_neither_the_hosts_nor_a_stopped_guests_files(
    host: LibvirtHost, user: QemuUser, data_dir: Path, tmp_path: Path
) -> None:
    volumes = tmp_path / "volumes"
    own, other = volume(volumes, "own"), volume(volumes, "other")
    first, second = defined(host, "own", own), defined(host, "other", other)
    host.start(first)
    host.start(second)
    key = data_dir / "keyring-of-the-service"
    key.write_bytes(b"key")
    key.chmod(0o600)
    host.undefine(second, second)  # it has run: its volume was that user's, too
    assert as_user(user, reading(own)) == "b'secret of own\\x00\\x00\\x00'", "the proof reads what it may"
    for path in (Path("/etc/shadow"), other, key):
        assert "PermissionError" in as_user(user, reading(path)), path
    listing = f"import os; print(os.listdir({str(volumes)!r}))"
    assert "PermissionError" in as_user(user, listing)
    root = data_dir / "libvirt"
    for name in ("run/qemu", "lib/swtpm", "etc/qemu"):
        assert "PermissionError" in as_user(user, f"import os; print(os.listdir({str(root / name)!r}))"), name
    key.unlink()


def test_what_the_guest_says_and_shows_is_still_seen(host: LibvirtHost, user: QemuUser, tmp_path: Path) -> None:
    uuid = defined(host, "seen", volume(tmp_path / "volumes", "seen"))
    host.start(uuid)
    picture = host.picture(uuid)
    assert picture is not None
    assert picture.startswith(b"\x89PNG")
    deadline = time.monotonic() + 100
    while b"SeaBIOS" not in host.console_log(uuid).read_bytes():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.fixture
def block(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """A block device and its file: owned by root and the group of disks, as udev makes those of zvols."""
    path = volume(tmp_path / "block", "block")
    need("losetup", "mount")
    device = Path(subprocess.run(["losetup", "-f", "--show", path], check=True, capture_output=True, text=True).stdout.strip())
    try:
        yield device, path
    finally:
        subprocess.run(["losetup", "-d", device], check=False)


def test_a_block_device_is_handed_over_and_made_again_under_the_guest(
    host: LibvirtHost, user: QemuUser, block: tuple[Path, Path]
) -> None:
    """udev gives a zvol's node back to root and its group when the zvol changes: the guest has it open, and goes on."""
    device, _ = block
    uuid = defined(host, "block", device, "block")
    host.start(uuid)
    assert device.stat().st_uid == user.uid
    os.chown(device, 0, 6)
    device.chmod(0o660)
    domain = host._find(str(uuid))
    assert domain is not None
    domain.reset()
    assert domain.isActive()
    assert domain.blockInfo("vda" if "vda" in domain.XMLDesc() else "sda")[0] == MIB
    host.undefine(uuid, uuid)
    assert device.stat().st_uid == 0


def test_a_tpm_and_uefi_variables_are_opened_by_their_users(
    host: LibvirtHost, user: QemuUser, data_dir: Path, tmp_path: Path
) -> None:
    """With the umask of the service, under which libvirt makes folders that nobody else may pass."""
    host._connection.use()  # else the folders above the data_dir would be made with that umask too
    before = os.umask(0o027)
    try:
        path = volume(tmp_path / "volumes", "tpm")
        uuid = defined(host, "tpm", path, firmware="uefi", secure_boot=True, tpm=True)
        host.start(uuid)
        tpm = next(p.parent for p in Path("/proc").glob("[0-9]*/cmdline") if _is_tpm_of(p, uuid))
        assert status(tpm)["Uid"][0] == str(pwd.getpwnam("tss").pw_uid)
        (variables,) = (data_dir / "libvirt/lib/qemu/nvram").iterdir()
        assert variables.stat().st_uid == process_of(uuid).stat().st_uid == user.uid
        # Its state as a restore leaves it, or a time when guests ran as root.
        domain = host._find(str(uuid))
        assert domain is not None
        domain.destroy()
        folder = data_dir / "libvirt/lib/swtpm" / str(uuid)
        for one in (folder, *folder.rglob("*")):
            os.chown(one, 0, 0)
            one.chmod(0o700)
        host.start(uuid)
        assert domain.isActive()
        host.undefine(uuid, uuid)
    finally:
        os.umask(before)


def _is_tpm_of(path: Path, uuid: UUID) -> bool:
    try:
        command_line = path.read_bytes()
    except OSError:
        return False
    return b"swtpm" in command_line.partition(b"\0")[0] and str(uuid).encode() in command_line


def test_a_guest_that_ran_as_root_goes_on_and_is_no_root_after_its_next_start(tmp_path: Path) -> None:
    uuid = UUID(int=0x5EED)
    argv = [sys.executable, "-m", "tests.real.hypervisor.earlier_child", str(tmp_path), "begin", str(uuid)]
    earlier = forked.Popen(argv, stdout=subprocess.PIPE, text=True)
    assert earlier.stdout is not None
    try:
        with earlier.stdout:
            assert [earlier.stdout.readline().strip() for _ in range(3)] == ["drawn", "defined", "started"]
            earlier.kill()
        assert status(process_of(uuid))["Uid"][0] == "0"
        # Found by a service of this version, it runs on: `start` of what runs does nothing.
        assert printed(tmp_path, "go on", uuid).startswith("started")
        assert status(process_of(uuid))["Uid"][0] == "0"
        assert printed(tmp_path, "restart", uuid) == "restarted"
        assert status(process_of(uuid))["Uid"][0] == str(pwd.getpwnam("libvirt-qemu").pw_uid)
    finally:
        earlier.kill()
        earlier.wait()
        assert printed(tmp_path, "end", uuid) == "gone"
    assert (tmp_path / "disk.raw").stat().st_uid == 0


def printed(folder: Path, action: str, uuid: UUID) -> str:
    argv = [sys.executable, "-m", "tests.real.hypervisor.guest_child", str(folder), action, str(uuid)]
    ran = forked.run(argv, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    return re.sub(r"\n.*", "", ran.stdout.strip(), flags=re.DOTALL)
