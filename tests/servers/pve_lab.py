"""Proxmox VE nodes of a test's own: the stand-in's API in front, and behind it real QEMU, real sshd, real sockets.

Each node is an sshd in a mount namespace whose /run is the node's own, so that QEMU's monitor is at Proxmox VE's path there. A
key may do what docs/platforms/proxmox.md lets it do, by that page's own forced command. What Proxmox VE adds to Debian (pvesm,
pveversion, qmeventd) is played here; qmeventd by what its source says of SHUTDOWN and of vzdump's handshake.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

from synvirt.live import SourceAccess
from synvirt.programs import end_group
from tests.fakes.pve.cluster import Cluster, Refused, Vm
from tests.fakes.pve.qmp import BackupAccess
from tests.fakes.pve.server import PveServer
from tests.needs import need, need_root
from tests.running.ports import free_port
from tests.servers.halting_rom import halting_rom
from tests.servers.libvirt_lab import until
from tests.servers.sshd import sshd_config

PAGE = Path(__file__).parents[2] / "docs/platforms/proxmox.md"

_ENTER = """\
set -e
mount --make-rprivate /
mount --bind "$1/run" /run
exec "$2" -D -e -f "$1/sshd_config"
"""

_PVESM = """\
#!/bin/sh
[ "$1" = path ] || exit 2
found="{lab}/storage/${{2%%:*}}/images/${{2#*:}}"
[ -e "$found" ] || {{ echo "no such volume '$2'" >&2; exit 255; }}
# A link is a volume of another storage, which is a device of the node.
[ -L "$found" ] && found=$(readlink "$found")
echo "$found"
"""


class Machine:
    """One QEMU, started as Proxmox VE starts it: -no-shutdown, its monitor, and another to qmeventd."""

    def __init__(self, lab: "PveLab", vm: Vm) -> None:
        self.vm = vm
        self._lab = lab
        self._run = lab.folder / vm.node / "run"
        (self._run / "qemu-server").mkdir(exist_ok=True)
        front = self._run / f"qemu-server/{vm.vmid}.qmp"
        self.qmp = self._run / f"{vm.vmid}.own" if vm.vmid in lab.with_access else front
        self.test_qmp, self.qga = self._run / f"{vm.vmid}.test", self._run / f"{vm.vmid}.qga"
        for old in (front, self.qmp, self.test_qmp, self.qga):
            old.unlink(missing_ok=True)
        self.access = BackupAccess(front, self.qmp) if self.qmp != front else None
        argv = [need("qemu-system-x86_64", "qemu-system-x86"), "-name", f"{vm.vmid}", "-no-shutdown", "-nodefaults"]
        argv += ["-display", "none", "-m", str(vm.config["memory"]), "-machine", "q35,accel=tcg"]
        argv += ["-bios", str(lab.rom)] if lab.rom is not None else []
        for name, path, more in (
            ("qmp", self.qmp, "server=on,wait=off"),
            ("qmp-event", self._run / "qmeventd.sock", "reconnect=5"),
            ("qmp-test", self.test_qmp, "server=on,wait=off"),
        ):
            argv += ["-chardev", f"socket,id={name},path={path},{more}", "-mon", f"chardev={name},mode=control"]
        argv += ["-device", "virtio-scsi-pci,id=virtioscsi0", "-device", "virtio-serial,id=qga0"]
        argv += ["-chardev", f"socket,path={self.qga},server=on,wait=off,id=qga", "-device"]
        argv += ["virtserialport,chardev=qga,name=org.qemu.guest_agent.0"]
        for number, (key, path, fmt) in enumerate(lab.disks(vm)):
            argv += ["-drive", f"file={path},if=none,id=drive-{key},format={fmt},cache=none,aio=threads,detect-zeroes=on"]
            kind = {"scsi": "scsi-hd,bus=virtioscsi0.0", "virtio": "virtio-blk-pci", "sata": "ide-hd,bus=ahci0.0"}
            if key.startswith("sata") and number == 0:
                argv += ["-device", "ahci,id=ahci0"]
            argv += ["-device", f"{kind[key.rstrip('0123456789')]},drive=drive-{key},id={key},bootindex={number + 1}"]
        with (lab.folder / f"{vm.vmid}.log").open("ab") as log:
            self.process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        # A socket is there before QEMU answers on it. `qm start` is over when QEMU says that its guest runs, and not before.
        until(lambda: self._runs() or self.process.poll() is not None)
        assert self.process.poll() is None, (lab.folder / f"{vm.vmid}.log").read_text()[-2000:]

    def _runs(self) -> bool:
        with contextlib.suppress(OSError, ValueError):
            return bool(self.ask("query-status")["running"])
        return False

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def ask(self, command: str, **arguments: Any) -> Any:
        with socket.socket(socket.AF_UNIX) as made:
            made.settimeout(60)
            made.connect(str(self.test_qmp))
            file = made.makefile("rw")
            file.readline()
            for question in ({"execute": "qmp_capabilities"}, {"execute": command, "arguments": arguments}):
                file.write(json.dumps(question) + "\n")
                file.flush()
                while "event" in (answer := json.loads(file.readline())):
                    pass
            assert "return" in answer, answer
            return answer["return"]

    def io(self, key: str, command: str) -> None:
        """As its guest would: through QEMU's block layer, so that bitmaps and filters see it."""
        qdev = next(one["qdev"] for one in self.ask("query-block") if re.search(rf"(^|/){key}(/|$)", one.get("qdev", "")))
        output = self.ask("human-monitor-command", **{"command-line": f'qemu-io -d {qdev} "{command}"'})
        assert output.strip() == "", output

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        if self.access is not None:
            self.access.close()


class PveLab:
    """A cluster of nodes, each at an address of its own on the loopback. The lab is its `Machines`, too."""

    def __init__(self, folder: Path, *nodes: str, boots: bool = False) -> None:
        """`boots`: its guests begin with a real firmware, which reads their disks."""
        self.folder = folder
        self.rom = None if boots else halting_rom(folder / "rom")
        self.ssh_port = free_port()
        self.machines: dict[int, Machine] = {}
        # Those whose QEMU has Proxmox VE's own commands for backup tools.
        self.with_access: set[int] = set()
        self._children: list[subprocess.Popen[bytes]] = []
        self._watchers: list[Qmeventd] = []
        self._closing = contextlib.ExitStack()
        self._vmids = iter(range(100, 1000))
        self.cluster = Cluster(self, nodes={name: f"127.0.0.{number}" for number, name in enumerate(nodes or ("pve1",), 1)})

    def __enter__(self) -> "PveLab":
        need_root("mount namespaces of nodes of its own")
        for program, package in (("sshd", "openssh-server"), ("ssh", "openssh-client"), ("unshare", "util-linux")):
            need(program, package)
        need("qemu-nbd", "qemu-utils")
        for name in ("ssh", "storage/local/images", "storage/local-lvm/images"):
            (self.folder / name).mkdir(parents=True)
        for name in ("host", "client"):
            argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(self.folder / "ssh" / name)]
            subprocess.run(argv, check=True)
        for name, address in self.cluster.nodes.items():
            self._make_node(name, address)
        self._authorize()
        for name, address in self.cluster.nodes.items():
            self.start_sshd(name, address)
        self.server = self._closing.enter_context(PveServer(self.cluster, self.folder))
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()
        self.kill_all()
        for watcher in self._watchers:
            watcher.close()
        for child in self._children:
            end_group(child)
            child.wait()
        # qemu-nbd forks away from the sshd that started it.
        for pid in self.servers():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def servers(self) -> list[int]:
        """The qemu-nbd that read disks of this lab."""
        found = []
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                words = entry.read_bytes().split(b"\0")
                if words[0].endswith(b"qemu-nbd") and any(os.fsencode(self.folder) in word for word in words):
                    found.append(int(entry.parent.name))
        return found

    # ── nodes ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _make_node(self, name: str, address: str) -> None:
        folder = self.folder / name
        for part in ("run/sshd", "run/qemu-server", "bin", "scratch"):
            (folder / part).mkdir(parents=True)
        (folder / "scratch").chmod(0o700)
        environment = f"PATH={folder}/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        keys = self.folder / "ssh"
        config = sshd_config(port=self.ssh_port, address=address, keys=keys, environment=environment)
        (folder / "sshd_config").write_text(config)
        programs = {
            "pvesm": _PVESM.format(lab=self.folder),
            "pveversion": "#!/bin/sh\necho pve-manager: 8.4.1\necho pve-qemu-kvm: 7.2.22-1\necho qemu-server: 8.4.0\n",
        }
        for program, text in programs.items():
            (folder / "bin" / program).write_text(text)
            (folder / "bin" / program).chmod(0o755)
        self._watchers.append(Qmeventd(self, name))

    def _authorize(self) -> None:
        """The page's own script, with the lab's folders for those of a node."""
        script = re.search(r"```sh\n(#!/bin/sh\n.*?)```", PAGE.read_text(), re.DOTALL)
        assert script is not None, "the page has the forced command"
        program = self.folder / "synvirt-node"
        program.write_text(script.group(1))
        program.chmod(0o755)
        key = (self.folder / "ssh/client.pub").read_text()
        (self.folder / "ssh/authorized").write_text(f'command="{program}",restrict,port-forwarding {key}')

    def start_sshd(self, name: str, address: str) -> "subprocess.Popen[bytes]":
        Path("/run/sshd").mkdir(exist_ok=True)
        folder = self.folder / name
        argv = ["unshare", "-m", "sh", "-c", _ENTER, "sh", str(folder), need("sshd", "openssh-server")]
        with (folder / "sshd.out").open("ab") as log:
            child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        self._children.append(child)
        until(lambda: _listens(address, self.ssh_port) or child.poll() is not None)
        assert child.poll() is None, (folder / "sshd.out").read_text()[-2000:]
        return child

    def access(self, *, credentials: dict[str, str] | None = None, **options: Any) -> SourceAccess:
        host_key = (self.folder / "ssh/host.pub").read_text()
        known = "".join(f"[{address}]:{self.ssh_port} {host_key}" for address in self.cluster.nodes.values())
        chosen = {
            "fingerprint_sha256": self.server.fingerprint,
            "ssh_port": self.ssh_port,
            "ssh_known_hosts": known,
            "scratch_dir": str(self.folder / next(iter(self.cluster.nodes)) / "scratch"),
            "shutdown_timeout_s": 1,
        }
        secrets = {
            "token_id": "mover@pve!synvirt",
            "token_secret": "t0ken",
            "ssh_private_key": (self.folder / "ssh/client").read_text(),
        }
        folder = self.folder / "service"
        return SourceAccess(
            self.server.endpoint, secrets if credentials is None else credentials, {**chosen, **options}, folder
        )

    # ── VMs ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def vm(
        self, *sizes: str, node: str = "pve1", key: str = "scsi", fmt: str = "raw", memory_mib: int = 64, **config: Any
    ) -> Vm:
        """Off, with empty disks."""
        vmid = next(self._vmids)
        vm = self.cluster.add(vmid, node, memory=str(memory_mib), scsihw="virtio-scsi-pci", ostype="l26", **config)
        vm.qemu = "7.2.22"
        for number, size in enumerate(sizes):
            self.attach(vm, f"{key}{number}", size, fmt)
        return vm

    def attach(self, vm: Vm, key: str, size: str, fmt: str = "raw") -> Path:
        name = f"vm-{vm.vmid}-disk-{key}"
        storage, volume = ("local-lvm", name) if fmt == "raw" else ("local", f"{vm.vmid}/{name}.{fmt}")
        path = self.folder / "storage" / storage / "images" / volume
        path.parent.mkdir(exist_ok=True)
        subprocess.run([need("qemu-img", "qemu-utils"), "create", "-q", "-f", fmt, str(path), size], check=True)
        vm.config[key] = f"{storage}:{volume},size={size}"
        info = json.loads(subprocess.check_output(["qemu-img", "info", "--output=json", "-f", fmt, str(path)]))
        about = {"format": fmt, "size": info["virtual-size"], "used": info["actual-size"]}
        self.cluster.volumes[f"{storage}:{volume}"] = {**about, "vmid": vm.vmid}
        return path

    def disks(self, vm: Vm) -> list[tuple[str, Path, str]]:
        found = []
        for key, value in vm.config.items():
            if re.fullmatch(r"(scsi|virtio|sata)[0-9]+", key):
                storage, _, volume = str(value).split(",")[0].partition(":")
                fmt = "qcow2" if volume.endswith(".qcow2") else "raw"
                found.append((key, self.folder / "storage" / storage / "images" / volume, fmt))
        return found

    def content(self, vm: Vm, key: str) -> bytes:
        """The disk as its guest sees it now."""
        machine = self.machines.get(vm.vmid)
        if machine is not None and machine.alive:
            machine.io(key, "flush")
        path, fmt = next((path, fmt) for one, path, fmt in self.disks(vm) if one == key)
        raw = self.folder / f"{uuid4().hex}.raw"
        subprocess.run(["qemu-img", "convert", "-U", "-f", fmt, "-O", "raw", str(path), str(raw)], check=True)
        content = raw.read_bytes()
        raw.unlink()
        return content

    def write(self, vm: Vm, key: str, offset: int, data: bytes) -> None:
        path = self.folder / f"{uuid4().hex}.data"
        path.write_bytes(data)
        self.machines[vm.vmid].io(key, f"write -s {path} {offset} {len(data)}")
        path.unlink()

    def leftovers(self, vm: Vm) -> list[str]:
        """All of ours on the node, and in the VM's QEMU."""
        found = [path.name for path in (self.folder / vm.node / "scratch").iterdir()]
        machine = self.machines.get(vm.vmid)
        if machine is not None and machine.alive:
            for node in machine.ask("query-named-block-nodes", flat=True):
                ours = str(node["node-name"]).startswith(("sv-", "pve-")) or str(node["node-name"]).endswith("-fleecing")
                found += [str(node["node-name"])] if ours else []
                found += [str(one.get("name")) for one in node.get("dirty-bitmaps", ()) if one.get("name")]
            found += [str(one["id"]) for one in machine.ask("query-block-exports")]
        return found

    def snapshots(self, vm: Vm) -> list[str]:
        return sorted({found.group() for one in self.leftovers(vm) if (found := re.match(r"synvirt-[A-Za-z0-9-]+", one))})

    # ── Machines ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def is_running(self, vmid: int) -> bool:
        return vmid in self.machines and self.machines[vmid].alive

    def status(self, vmid: int) -> str:
        if not self.is_running(vmid):
            return "stopped"
        with contextlib.suppress(OSError, ValueError, AssertionError):
            return str(self.machines[vmid].ask("query-status")["status"])
        return "stopped"

    def start(self, vmid: int) -> None:
        if not self.is_running(vmid):
            self.machines[vmid] = Machine(self, self.cluster.vms[vmid])

    def power_button(self, vmid: int) -> None:
        """As `qm shutdown` does: by the agent, where the VM has one, else by ACPI."""
        machine = self.machines[vmid]
        if "agent" not in machine.vm.config:
            machine.ask("system_powerdown")
            return
        with socket.socket(socket.AF_UNIX) as made:
            made.connect(str(machine.qga))
            made.sendall(b'{"execute": "guest-shutdown"}\n')
            made.settimeout(1)
            with contextlib.suppress(TimeoutError):
                made.recv(4096)

    def kill(self, vmid: int) -> None:
        self.machines[vmid].kill()

    def kill_all(self) -> None:
        for machine in self.machines.values():
            machine.kill()
        self.machines.clear()

    def agent(self, vmid: int, command: str) -> Any:
        """By the guest's own, where there is one."""
        machine = self.machines[vmid]
        with socket.socket(socket.AF_UNIX) as made:
            made.settimeout(5)
            try:
                made.connect(str(machine.qga))
                made.sendall(json.dumps({"execute": f"guest-{command}"}).encode() + b"\n")
                return json.loads(made.makefile().readline())["return"]
            except (OSError, ValueError, KeyError):
                raise Refused(500, "QEMU guest agent is not running") from None


class Qmeventd:
    """Ends a QEMU whose guest has shut down, unless a backup has said that it is at it (proxmox/qemu-server, qmeventd.c)."""

    def __init__(self, lab: PveLab, node: str) -> None:
        self._lab = lab
        self.backups: set[str] = set()
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(lab.folder / node / "run/qmeventd.sock"))
        self._listening.listen()
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def close(self) -> None:
        # A close alone does not end an accept that waits, and buffers are emptied where no thread is left (kept_small.py).
        self._listening.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listening.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        backup = ""
        with client, contextlib.suppress(OSError, ValueError):
            for line in client.makefile():
                message = json.loads(line)
                if "QMP" in message:
                    client.sendall(b'{"execute":"qmp_capabilities"}\n')
                elif "vzdump" in message:
                    backup = str(message["vzdump"]["vmid"])
                    self.backups.add(backup)
                elif message.get("event") == "SHUTDOWN":
                    pid = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
                    self._end_dead(pid)
        if backup:
            self.backups.discard(backup)
            self._end_dead(None)

    def _end_dead(self, pid: int | None) -> None:
        for vmid, machine in list(self._lab.machines.items()):
            if pid not in (None, machine.process.pid) or str(vmid) in self.backups or not machine.alive:
                continue
            with contextlib.suppress(OSError, ValueError, AssertionError):
                if machine.ask("query-status")["status"] not in ("running", "paused"):
                    machine.process.terminate()
                    machine.process.wait(30)


@contextlib.contextmanager
def pve_lab(*nodes: str, boots: bool = False) -> Iterator[PveLab]:
    folder = Path(tempfile.mkdtemp(prefix="svp-", dir="/var/tmp"))
    try:
        with PveLab(folder, *nodes, boots=boots) as running:
            yield running
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _listens(address: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=1):
        return True
    return False
