"""Which cage an order gets: what it names, and no more."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from synvirt.cage import Network
from synvirt.cage.scratch import sweep
from synvirt.disks import specs
from synvirt.disks.specs import FileWriterSpec, ImageSpec, NbdSpec, NfsSpec, QemuSpec, RawSpec, ReaderSpec
from synvirt.jobs import caging
from synvirt.jobs.caging import cage_of
from synvirt.jobs.orders import CopyOrder, DiskOrder
from synvirt.remote import Remote
from tests.cage.test_cage import needs

RAW = RawSpec(path="/imports/a.vmdk")
HTTPS = Remote(url="https://nas.example/", ca_file="/etc/own.pem")


def order(reader: ReaderSpec) -> CopyOrder:
    writer = FileWriterSpec(path="/volumes/one", size_bytes=512)
    return CopyOrder(disks=(DiskOrder(key="a", reader=reader, writer=writer),))


@pytest.mark.parametrize(
    ("reader", "reads", "network", "programs"),
    [
        (RAW, {"/imports/a.vmdk"}, Network.NONE, False),
        (ImageSpec(format="vmdk", over=RAW, root="/imports"), {"/imports", "/imports/a.vmdk"}, Network.NONE, False),
        (QemuSpec(driver="qed", path="/imports/a.qed", key_file="/k"), {"/imports/a.qed", "/k"}, Network.LOCAL, True),
        (RawSpec(path="a.ova", remote=HTTPS), {"/etc/own.pem"}, Network.ELSEWHERE, False),
        (RawSpec(path="a.ova", remote=replace(HTTPS, url="smb://nas/x")), {"/etc/own.pem"}, Network.ANY, True),
        (NbdSpec(uri="nbd+unix:///x?socket=/run/n.sock"), {"/run/n.sock"}, Network.LOCAL, False),
        (NbdSpec(uri="nbds://host/x?tls-certificates=/pki"), {"/pki"}, Network.ELSEWHERE, False),
    ],
)
def test_what_a_reader_names(reader: ReaderSpec, reads: set[str], network: Network, programs: bool) -> None:
    cage = cage_of(order(reader))
    assert (set(cage.reads), cage.network, cage.programs) == (reads, network, programs)
    assert set(cage.writes) == {"/volumes/one"}
    assert cage.temporary is programs
    assert not cage.as_root


TAKEN_OVER = """
import json, os, sys, tempfile
from synvirt.cage import enter
from synvirt.cage.scratch import housed
from synvirt.disks.specs import FileWriterSpec, QemuSpec
from synvirt.jobs.caging import cage_of
from synvirt.jobs.orders import CopyOrder, DiskOrder
disk = DiskOrder(key="a", reader=QemuSpec(driver="qed", path="/a"), writer=FileWriterSpec(path="/dev/null", size_bytes=512))
enter(housed(cage_of(CopyOrder(disks=(disk,)))))
with tempfile.NamedTemporaryFile() as own:
    own.write(b"of this job")
found = []
for does in ("open(sys.argv[1])", "open(sys.argv[1], 'w')", "os.listdir(os.path.dirname(sys.argv[1]))"):
    try:
        eval(does)
        found.append(None)
    except OSError as error:
        found.append(type(error).__name__)
print(json.dumps([os.getpid(), os.path.dirname(own.name), found]))
"""


def test_a_worker_with_programs_does_not_reach_temporary_files_of_other_jobs(tmp_path: Path) -> None:
    """As the keys and the password programs of sources are, which the service's ssh runs."""
    needs("landlock")
    other = tmp_path / "synvirt-live-abcdefgh.held"
    other.mkdir()
    (other / "askpass").write_text("#!/bin/sh")
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    argv = [sys.executable, "-P", "-c", TAKEN_OVER, str(other / "askpass")]
    ran = subprocess.run(argv, capture_output=True, text=True, env=env, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
    process, own, found = json.loads(ran.stdout)
    assert found == ["PermissionError"] * 3
    assert (other / "askpass").read_text() == "#!/bin/sh"
    assert Path(own).parent == tmp_path
    assert Path(own).is_dir()
    sweep(tmp_path, kind=f"cage-{process}")
    assert [one.name for one in tmp_path.iterdir()] == [other.name]


def test_an_nfs_server_is_asked_as_root() -> None:
    cage = cage_of(order(NfsSpec(host="h", export="/e", path="d")))
    assert (cage.as_root, cage.network, cage.programs) == (True, Network.ELSEWHERE, False)


def test_each_kind_of_reader_has_a_cage() -> None:
    """A new kind is allowed programs and the network until somebody has looked at it: say here which it needs."""
    looked_at = {*caging._HERE, *caging._CONNECTING, RawSpec, specs.VddkSpec, specs.IscsiSpec}
    looked_at |= {specs.Qcow2WriterSpec}  # no order to copy has one
    kinds = {found for found in vars(specs).values() if isinstance(found, type) and issubclass(found, specs.Spec)}
    assert kinds - {specs.Spec} <= looked_at
