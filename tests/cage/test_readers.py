"""The readers that reach out or start programs, each in the very cage that an order to copy gives it: what they need is there.

Real servers and programs; VMware's plugin alone is stood in for, by a script that starts nbdkit as it would be started.
"""

import hashlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread

import pytest

from synvirt.disks.specs import FileWriterSpec, IscsiSpec, NfsSpec, QemuSpec, RawSpec, ReaderSpec, VddkSpec
from synvirt.jobs.orders import CopyOrder, DiskOrder
from tests.disks.luks_images import luks_image
from tests.drawn import shared_in_a_file
from tests.fakes import vddk as stand_in
from tests.fakes.prism.iscsi import PREFIX, iscsi_target
from tests.fakes.prism.lab import HERE
from tests.fakes.prism.nfs import nfs_server
from tests.fakes.prism.state import Group, GroupDisk, State
from tests.servers.certificates import self_signed, tls_server
from tests.servers.remote_servers import PASSWORD, remote, samba

SIZE = 5 << 20


@shared_in_a_file
def content() -> bytes:
    return random.Random(8).randbytes(SIZE)


INITIATOR = "iqn.2024-01.org.synvirt:host"

# What the worker does with an order, up to the reading.
CHILD = """
import hashlib, json, sys
from synvirt.cage import enter
from synvirt.cage.scratch import housed
from synvirt.disks import open_reader
from synvirt.jobs.caging import cage_of
from synvirt.jobs.orders import CopyOrder
order = CopyOrder.from_line(sys.stdin.buffer.read())
held = enter(housed(cage_of(order)))
reader = open_reader(order.disks[0].reader)
buffer = bytearray(reader.size)
reader.read_into(0, memoryview(buffer))
place = getattr(getattr(getattr(reader, "_file", reader), "_connection", None), "place", None)
native = place.native() if place is not None else None
report = {"held": held, "sha256": hashlib.sha256(buffer).hexdigest(), "native": native.read_bytes if native else 0}
reader.close()
print(json.dumps(report))
"""


def state(folder: Path) -> State:
    (folder / "containers").mkdir()
    return State(folder / "containers")


def nfs(folder: Path, closing: ExitStack) -> ReaderSpec:
    kept = state(folder)
    kept.cluster_list.append(HERE)
    (kept.folder / "default" / "disk").write_bytes(content())
    ports = closing.enter_context(nfs_server(folder / "server", kept))
    return NfsSpec(host="127.0.0.1", export="/default", path="/disk", nfs_port=ports[0], mount_port=ports[1])


def iscsi(folder: Path, closing: ExitStack) -> ReaderSpec:
    kept = state(folder)
    (folder / "disk").write_bytes(content())
    portal = closing.enter_context(iscsi_target(folder / "server", kept))
    group = Group("1", "disks", "c")
    kept.on_group("made", group)
    group.disks.append(GroupDisk("1", 1, "", "", SIZE, folder / "disk"))
    kept.on_group("disk", group)
    group.clients["1"] = INITIATOR
    kept.on_group("clients", group)
    return IscsiSpec(portal=portal, target=PREFIX + group.target, lun=1, initiator=INITIATOR)


def smb(folder: Path, closing: ExitStack) -> ReaderSpec:
    share = closing.enter_context(samba(folder))
    (share.folder / "disk").write_bytes(content())
    return RawSpec(path="disk", remote=remote(share.url, credentials=(("username", "root"), ("password", PASSWORD))))


def qemu(folder: Path, closing: ExitStack) -> ReaderSpec:
    """One whose passphrase is handed on in a file, too."""
    (folder / "disk").write_bytes(content())
    (folder / "key").write_text("open, sesame")
    image = luks_image(folder / "image", folder / "disk", folder / "key")
    return QemuSpec(driver="luks", path=str(image), key_file=str(folder / "key"))


class _Silent(BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


def vddk(folder: Path, closing: ExitStack) -> ReaderSpec:
    """nbdkit's real plugin lies where VDDK does, which the order names, in a folder that any user may enter."""
    place = Path(closing.enter_context(TemporaryDirectory(prefix="vddk-")))
    place.chmod(0o755)
    made = stand_in.made(place)
    (made.libdir / "vm").mkdir()
    (made.libdir / "vm" / "disk-flat.vmdk").write_bytes(content())
    certificate = self_signed(folder)
    server = tls_server(ThreadingHTTPServer(("127.0.0.1", 0), _Silent), certificate)
    Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    closing.callback(server.server_close)
    closing.callback(server.shutdown)
    port = server.server_address[1]
    made.set(
        server="127.0.0.1", port=port, user="u", password="p", thumbprint="*", vm="moref=vm-1", snapshot="s-1",
        transports="nbdssl", datastore=made.libdir,
    )  # fmt: skip
    return VddkSpec(
        host="127.0.0.1",
        port=port,
        fingerprint_sha256=certificate.fingerprint,
        verify_tls=False,
        user="u",
        password="p",
        vm_id="vm-1",
        snapshot_id="s-1",
        file="[a] vm/disk.vmdk",
        libdir=str(made.libdir),
    )


READERS: dict[str, Callable[[Path, ExitStack], ReaderSpec]] = {
    "NFS by libnfs": nfs,
    "iSCSI by qemu-nbd": iscsi,
    "SMB by Samba's client": smb,
    "LUKS by qemu-nbd": qemu,
    "VDDK by nbdkit": vddk,
}


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize("name", READERS)
def test_a_reader_finds_in_its_cage_what_it_needs(name: str, tmp_path: Path, closing: ExitStack) -> None:
    spec = READERS[name](tmp_path, closing)
    path = os.environ["PATH"]
    if isinstance(spec, VddkSpec):
        path = f"{spec.libdir}:{path}"
    writer = FileWriterSpec(path=str(tmp_path / "volume"), size_bytes=SIZE)
    order = CopyOrder(disks=(DiskOrder(key="a", reader=spec, writer=writer),))
    ran = subprocess.run(
        [sys.executable, "-P", "-c", CHILD],
        input=order.to_line().decode(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PATH": path},
    )
    assert ran.returncode == 0, ran.stderr
    report = json.loads(ran.stdout)
    assert report["sha256"] == hashlib.sha256(content()).hexdigest()
    if isinstance(spec, RawSpec):
        assert report["native"] > 0, "Samba's client was not of use: Python's own read the file"
