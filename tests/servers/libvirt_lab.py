"""A libvirt host of a test's own: libvirtd in a mount namespace, an authority, certificates, an sshd; ended with the test.

Nothing of the machine's own libvirt is touched: what it keeps in /run, /var and /etc are folders of the test in there. Its
sockets and disks lie in a folder with a short path, which both sides see.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

from synvirt.errors import Internal
from synvirt.kvm.library import load
from synvirt.live import SourceAccess
from synvirt.live.libvirt import backup
from synvirt.live.libvirt.manifest import data_disks, parse
from synvirt.programs import end_group
from tests.needs import need, need_root
from tests.running import processes
from tests.running.ports import free_port
from tests.servers import libvirt_capabilities
from tests.servers.halting_rom import SEABIOS, halting_rom
from tests.servers.sshd import sshd_config

START_TIMEOUT_S = 120
SMALL_BYTES = 12 << 20

_ENTER = """\
set -e
mount --make-rprivate /
for name in run lib log cache; do mkdir -p "$1/$name"; done
mkdir -p /run/libvirt /var/lib/libvirt /var/log/libvirt /var/cache/libvirt
mount --bind "$1/run" /run/libvirt
mount --bind "$1/lib" /var/lib/libvirt
mount --bind "$1/log" /var/log/libvirt
mount --bind "$1/cache" /var/cache/libvirt
mount --bind "$1/etc" /etc/libvirt
[ ! -e "$1/rom" ] || mount --bind "$1/rom" "$3"
# --listen: for TLS and TCP, where no systemd hands sockets over.
exec "$2" --listen --config "$1/libvirtd.conf" --pid-file "$1/pid"
"""

_QEMU_CONF = """\
user = "root"
group = "root"
security_driver = "none"
namespaces = []
cgroup_controllers = []
dynamic_ownership = 0
remember_owner = 0
stdio_handler = "file"
backup_tls_x509_cert_dir = "{pki}"
backup_tls_x509_verify = 1
"""

_LIBVIRTD_CONF = """\
unix_sock_dir = "{folder}/sock"
auth_unix_rw = "none"
listen_tls = 1
listen_tcp = 1
listen_addr = "127.0.0.1"
tcp_port = "{tcp_port}"
tls_port = "{tls_port}"
auth_tcp = "none"
auth_tls = "none"
key_file = "{pki}/server-key.pem"
cert_file = "{pki}/server-cert.pem"
ca_file = "{pki}/ca-cert.pem"
log_outputs = "3:file:{folder}/libvirtd.log"
"""


class LibvirtLab:
    """One host. `access(transport)` is how a source of it is registered; `connection` is the test's own, by its socket."""

    def __init__(self, folder: Path, *, boots: bool = False) -> None:
        """`boots`: its guests begin with a real firmware, which reads their disks."""
        self.folder = folder
        if not boots and SEABIOS.exists():
            halting_rom(folder / "rom")
        self.tcp_port, self.tls_port, self.ssh_port = free_port(), free_port(), free_port()
        self.nbd_ports = tuple(sorted((free_port(), free_port())))
        self._children: list[subprocess.Popen[bytes]] = []
        self._daemon: subprocess.Popen[bytes] | None = None
        self.connection: Any = None

    def __enter__(self) -> "LibvirtLab":
        need_root("mount namespaces of a libvirtd of its own")
        for program, package in (
            ("libvirtd", "libvirt-daemon"),
            ("sshd", "openssh-server"),
            ("ssh", "openssh-client"),
            ("openssl", "openssl"),
            ("unshare", "util-linux"),
            ("qemu-system-x86_64", "qemu-system-x86"),
            ("qemu-img", "qemu-utils"),
        ):
            need(program, package)
        for name in ("sock", "etc", "pki", "ssh", "disks", "scratch"):
            (self.folder / name).mkdir()
        # A small file system, which both the host and the test see.
        (self.folder / "small").mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SMALL_BYTES}", "tmpfs", str(self.folder / "small")], check=True)
        self._make_pki()
        self._make_keys()
        (self.folder / "etc/qemu.conf").write_text(
            libvirt_capabilities.FEATURES_AT_ONCE + _QEMU_CONF.format(pki=self.folder / "pki")
        )
        (self.folder / "libvirtd.conf").write_text(
            _LIBVIRTD_CONF.format(folder=self.folder, pki=self.folder / "pki", tcp_port=self.tcp_port, tls_port=self.tls_port)
        )
        (self.folder / "sshd_config").write_text(sshd_config(port=self.ssh_port, keys=self.folder / "ssh"))
        cache, kept = self.folder / "cache", libvirt_capabilities.kept_for(uid=0)
        is_known = libvirt_capabilities.give(cache, kept)
        self.start_libvirtd()
        if not is_known:
            libvirt_capabilities.keep(self.connection, cache, kept)
        self.start_sshd()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill_all()
        with contextlib.suppress(load(Internal).libvirtError):
            self.connection.close()
        for child in self._children:
            end_group(child)
            child.wait()
        subprocess.run(["umount", "-l", str(self.folder / "small")], check=False)

    # ── daemons ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def start_libvirtd(self) -> None:
        """Guests outlive it, and a new one finds them."""
        argv = ["unshare", "-m", "sh", "-c", _ENTER, "sh", str(self.folder), need("libvirtd", "libvirt-daemon")]
        argv += [str(SEABIOS)]
        with (self.folder / "libvirtd.out").open("ab") as log:
            child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        self._children.append(child)
        self._daemon = child
        until(lambda: self._try_connect() or child.poll() is not None)
        assert child.poll() is None, (self.folder / "libvirtd.out").read_text()[-2000:]

    def stop_libvirtd(self) -> None:
        assert self._daemon is not None
        self._daemon.kill()
        self._daemon.wait()

    def start_sshd(self) -> "subprocess.Popen[bytes]":
        Path("/run/sshd").mkdir(exist_ok=True)  # its place for privilege separation
        argv = [need("sshd", "openssh-server"), "-D", "-e", "-f", str(self.folder / "sshd_config")]
        with (self.folder / "sshd.out").open("ab") as log:
            child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        self._children.append(child)
        until(lambda: _listens(self.ssh_port) or child.poll() is not None)
        assert child.poll() is None, (self.folder / "sshd.out").read_text()[-2000:]
        return child

    def _try_connect(self) -> bool:
        libvirt = load(Internal)
        try:
            self.connection = libvirt.open(f"qemu+unix:///system?socket={self.socket}")
        except libvirt.libvirtError:
            return False
        return True

    def _qemus(self) -> list[int]:
        found = []
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if b"qemu-system" in (command := entry.read_bytes()) and os.fsencode(self.folder) in command:
                    found.append(int(entry.parent.name))
        return found

    # ── who may come in ──────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def socket(self) -> str:
        return f"{self.folder}/sock/libvirt-sock"

    def access(self, transport: str, *, credentials: dict[str, str] | None = None, **options: Any) -> SourceAccess:
        pki, ssh = self.folder / "pki", self.folder / "ssh"
        by: dict[str, tuple[str, dict[str, str], dict[str, Any]]] = {
            "local": (f"qemu+unix:///system?socket={self.socket}", {}, {}),
            "ssh": (
                f"qemu+ssh://root@127.0.0.1:{self.ssh_port}/system?socket={self.socket}",
                {"private_key": (ssh / "client").read_text()},
                {"known_hosts": f"[127.0.0.1]:{self.ssh_port} {(ssh / 'host.pub').read_text()}"},
            ),
            "tls": (
                f"qemu+tls://127.0.0.1:{self.tls_port}/system",
                {
                    "ca_certificate": (pki / "ca-cert.pem").read_text(),
                    "client_certificate": (pki / "client-cert.pem").read_text(),
                    "client_key": (pki / "client-key.pem").read_text(),
                },
                {"nbd_ports": self.nbd_ports},
            ),
            "tcp": (
                f"qemu+tcp://127.0.0.1:{self.tcp_port}/system",
                {},
                {"nbd_ports": self.nbd_ports, "allow_plain_nbd": True},
            ),
        }
        endpoint, secrets, chosen = by[transport]
        return SourceAccess(
            endpoint,
            secrets if credentials is None else credentials,
            {"scratch_dir": str(self.folder / "scratch"), "quiesce": "off", "shutdown_timeout_s": 1, **chosen, **options},
            self.folder,
        )

    def _make_keys(self) -> None:
        for name in ("host", "client"):
            argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(self.folder / "ssh" / name)]
            subprocess.run(argv, check=True)
        # No more than the product asks for: no command, no terminal, no agent.
        key = (self.folder / "ssh/client.pub").read_text()
        (self.folder / "ssh/authorized").write_text(f"restrict,port-forwarding {key}")

    def _make_pki(self) -> None:
        pki = self.folder / "pki"

        def openssl(*argv: str) -> None:
            subprocess.run(["openssl", *argv], check=True, capture_output=True, cwd=pki)

        new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
        openssl("req", "-x509", *new_key, "-keyout", "ca-key.pem", "-out", "ca-cert.pem", "-days", "2", "-subj", "/CN=lab")
        for name, usage in (("server", "serverAuth"), ("client", "clientAuth")):
            openssl("req", "-new", *new_key, "-keyout", f"{name}-key.pem", "-out", f"{name}.csr", "-subj", f"/CN={name}")
            (pki / f"{name}.ext").write_text(
                f"subjectAltName=IP:127.0.0.1\nextendedKeyUsage={usage}\nkeyUsage=digitalSignature\nbasicConstraints=CA:FALSE\n"
            )
            self._sign(name)

    def renew_certificate(self) -> None:
        """Its servers' certificate, signed again: who has read the one before shows that one on."""
        self._sign("server")

    def _sign(self, name: str) -> None:
        argv = [
            "openssl",
            "x509",
            "-req",
            "-in",
            f"{name}.csr",
            "-CA",
            "ca-cert.pem",
            "-CAkey",
            "ca-key.pem",
            "-CAcreateserial",
        ]
        argv += ["-out", f"{name}-cert.pem", "-days", "2", "-extfile", f"{name}.ext"]
        subprocess.run(argv, check=True, capture_output=True, cwd=self.folder / "pki")

    # ── guests ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def disk(self, size: str = "8M", fmt: str = "qcow2", *options: str) -> Path:
        path = self.folder / "disks" / f"{uuid4().hex[:12]}.{fmt}"
        subprocess.run(["qemu-img", "create", "-q", "-f", fmt, *options, str(path), size], check=True)
        return path

    def domain(self, *disks: Path, extra: str = "", transient: bool = False, memory_mib: int = 64) -> Any:
        """A machine with nothing to boot, its disks vda, vdb, …; not started."""
        listed = "".join(
            f"<disk type='file' device='disk'><driver name='qemu' type='{path.suffix[1:]}'/><source file='{path}'/>"
            f"<target dev='vd{chr(ord('a') + number)}' bus='virtio'/></disk>"
            for number, path in enumerate(disks)
        )
        xml = (
            f"<domain type='qemu'><name>vm-{uuid4().hex[:8]}</name><memory unit='MiB'>{memory_mib}</memory><vcpu>1</vcpu>"
            "<os><type arch='x86_64' machine='q35'>hvm</type></os><features><acpi/></features><devices>"
            f"<emulator>/usr/bin/qemu-system-x86_64</emulator>{listed}{extra}<memballoon model='none'/></devices></domain>"
        )
        return self.connection.createXML(xml, 0) if transient else self.connection.defineXML(xml)

    def kill(self, domain: Any) -> None:
        """Its QEMU, at once: to be asked takes it a second or two."""
        os.kill(int((self.folder / "run/qemu" / f"{domain.name()}.pid").read_text()), signal.SIGKILL)
        until(lambda: not domain.isActive())

    def kill_all(self) -> None:
        """By force: to be asked takes each of them a second or two."""
        for pid in self._qemus():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def write(self, domain: Any, key: str, offset: int, data: bytes) -> None:
        """As its guest would: through QEMU's block layer, so that bitmaps see it."""
        path = self.folder / f"{uuid4().hex}.data"
        path.write_bytes(data)
        self._qemu_io(domain, key, f"write -s {path} {offset} {len(data)}")
        path.unlink()

    def content(self, domain: Any, key: str) -> bytes:
        """The disk as its guest sees it now."""
        if domain.isActive():
            self._qemu_io(domain, key, "flush")
        source = next(disk.find("source") for name, disk in data_disks(parse(domain.XMLDesc(0))) if name == key)
        assert source is not None
        image, raw = Path(source.get("file", "")), self.folder / f"{uuid4().hex}.raw"
        argv = ["qemu-img", "convert", "-U", "-f", image.suffix[1:], "-O", "raw", str(image), str(raw)]
        subprocess.run(argv, check=True, capture_output=True)
        content = raw.read_bytes()
        raw.unlink()
        return content

    def size(self, domain: Any, key: str) -> int:
        return int(domain.blockInfo(key)[0])

    def snapshots(self, domain: Any) -> list[str]:
        """What of ours the domain holds: checkpoints, and the backup job that runs."""
        found = {str(one.getName()) for one in domain.listAllCheckpoints(0)}
        job = backup.running(domain)
        return sorted(found | ({job.snapshot or "foreign"} if job is not None else set()))

    def _qemu_io(self, domain: Any, key: str, command: str) -> None:
        import libvirt_qemu

        blocks = json.loads(libvirt_qemu.qemuMonitorCommand(domain, '{"execute":"query-block"}', 0))["return"]
        device = next(one["qdev"] for one in blocks if _target(domain, one) == key)
        as_person = libvirt_qemu.VIR_DOMAIN_QEMU_MONITOR_COMMAND_HMP
        output = libvirt_qemu.qemuMonitorCommand(domain, f'qemu-io -d {device} "{command}"', as_person)
        assert output.strip() == "", output


def _target(domain: Any, block: dict[str, Any]) -> str:
    """libvirt's name of the disk that QEMU's block device is: by its file."""
    file = block.get("inserted", {}).get("image", {}).get("filename", "")
    for key, disk in data_disks(parse(domain.XMLDesc(0))):
        source = disk.find("source")
        if source is not None and file and source.get("file", "") in file:
            return key
    return ""


@contextlib.contextmanager
def lab(*, boots: bool = False) -> Iterator[LibvirtLab]:
    folder = Path(tempfile.mkdtemp(prefix="svlab-", dir="/var/tmp"))
    try:
        with LibvirtLab(folder, boots=boots) as running:
            yield running
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def until(happened: Any, timeout_s: float = START_TIMEOUT_S) -> None:
    processes.until(happened, timeout_s)


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False
