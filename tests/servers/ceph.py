"""A real Ceph cluster of the tests' own on this machine: a monitor, a manager, one disk in a file; gone when they end."""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from tests.needs import lacking, need, need_root
from tests.running.ports import free_port
from tests.running.processes import until

POOL = "vms"
GIB = 1 << 30

_CONFIG = """[global]
fsid = {fsid}
mon host = [v2:127.0.0.1:{v2},v1:127.0.0.1:{v1}]
mon initial members = a
public network = 127.0.0.0/8
auth cluster required = cephx
auth service required = cephx
auth client required = cephx
osd pool default size = 1
osd pool default min size = 1
mon allow pool size one = true
mon warn on pool no redundancy = false
mon data avail crit = 1
mon data avail warn = 1
osd crush chooseleaf type = 0
run dir = {folder}/run
admin socket =
log file = {folder}/log/$name.log
pid file = {folder}/run/$name.pid
keyring = {folder}/$name.keyring
osd memory target = 939524096
osd objectstore = bluestore
bluestore block size = {disk_bytes}
bluestore block db create = false
mgr pool = false
ms bind ipv6 = false
[mon.a]
mon data = {folder}/mon
[mgr.x]
mgr data = {folder}/mgr
[osd.0]
osd data = {folder}/osd
keyring = {folder}/osd/keyring
"""


@contextlib.contextmanager
def cluster() -> Iterator[Path]:
    """The path of its ceph.conf; client.admin may all, and the pool `vms` is made."""
    need_root("a Ceph cluster")
    for program, package in (
        ("ceph-mon", "ceph-mon"),
        ("ceph-mgr", "ceph-mgr"),
        ("ceph-osd", "ceph-osd"),
        ("rbd", "ceph-common"),
    ):
        need(program, package)
    try:
        import rbd  # noqa: F401
    except ImportError:
        lacking("needs librbd for Debian's Python: apt-get install python3-rbd")
    folder = Path(tempfile.mkdtemp(prefix="synvirt-ceph-"))
    try:
        _start(folder)
        yield folder / "ceph.conf"
    finally:
        _stop(folder)
        shutil.rmtree(folder, ignore_errors=True)


def rbd(conf: Path, *arguments: str) -> str:
    """What Ceph's own command line says of the pool."""
    return _run("rbd", "-c", conf, "-p", POOL, *arguments)


def _start(folder: Path) -> None:
    for name in ("mon", "mgr", "osd", "run", "log"):
        (folder / name).mkdir()
    v1, v2 = free_port(), free_port()
    fsid = str(uuid.uuid4())
    conf = folder / "ceph.conf"
    conf.write_text(_CONFIG.format(fsid=fsid, v1=v1, v2=v2, folder=folder, disk_bytes=8 * GIB))
    mon_keys, admin_keys = folder / "mon.a.keyring", folder / "client.admin.keyring"
    allow = [part for room in ("mon", "osd", "mgr", "mds") for part in ("--cap", room, "allow *")]
    _run("ceph-authtool", "--create-keyring", mon_keys, "--gen-key", "-n", "mon.", "--cap", "mon", "allow *")
    _run("ceph-authtool", "--create-keyring", admin_keys, "--gen-key", "-n", "client.admin", *allow)
    _run("ceph-authtool", mon_keys, "--import-keyring", admin_keys)
    addresses = f"[v2:127.0.0.1:{v2},v1:127.0.0.1:{v1}]"
    _run("monmaptool", "--create", "--clobber", "--addv", "a", addresses, "--fsid", fsid, folder / "monmap")
    _run("ceph-mon", "-c", conf, "--mkfs", "-i", "a", "--monmap", folder / "monmap", "--keyring", mon_keys)
    shutil.copy(mon_keys, folder / "mon" / "keyring")
    _run("ceph-mon", "-c", conf, "-i", "a")
    ceph = ("ceph", "-c", conf, "--connect-timeout", "100")
    keys = _run(*ceph, "auth", "get-or-create", "mgr.x", "mon", "allow profile mgr", "osd", "allow *", "mds", "allow *")
    (folder / "mgr.x.keyring").write_text(keys)
    _run("ceph-mgr", "-c", conf, "-i", "x")
    disk, secret = str(uuid.uuid4()), _run("ceph-authtool", "--gen-print-key").strip()
    _run(*ceph, "osd", "new", disk, "-i", "-", words=f'{{"cephx_secret": "{secret}"}}')
    _run("ceph-authtool", "--create-keyring", folder / "osd" / "keyring", "--name", "osd.0", "--add-key", secret)
    _run("ceph-osd", "-c", conf, "-i", "0", "--mkfs", "--osd-uuid", disk)
    _run("ceph-osd", "-c", conf, "-i", "0")
    _run(*ceph, "osd", "pool", "create", POOL, "8")
    _run("rbd", "-c", conf, "pool", "init", POOL)
    # Its free space is known once the manager has its figures.
    until(lambda: f'"{POOL}"' in _run(*ceph, "df", "--format", "json"), 60)


def _stop(folder: Path) -> None:
    for pid_file in (folder / "run").glob("*.pid"):
        with contextlib.suppress(OSError, ValueError):
            pid = int(pid_file.read_text())
            os.kill(pid, signal.SIGKILL)
            deadline = time.monotonic() + 20
            while Path(f"/proc/{pid}/fd").exists() and time.monotonic() < deadline:
                time.sleep(0.05)


def _run(*argv: str | Path, words: str = "") -> str:
    done = subprocess.run(list(map(str, argv)), input=words, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, f"{argv[0]} {argv[1]}: {done.stderr}"
    return done.stdout
