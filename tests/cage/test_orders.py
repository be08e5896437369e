"""Which cage an order gets: what it names, and no more."""

import tempfile
from dataclasses import replace

import pytest

from synvirt.cage import Network
from synvirt.disks import specs
from synvirt.disks.specs import FileWriterSpec, ImageSpec, NbdSpec, NfsSpec, QemuSpec, RawSpec, ReaderSpec
from synvirt.jobs import caging
from synvirt.jobs.caging import cage_of
from synvirt.jobs.orders import CopyOrder, DiskOrder
from synvirt.remote import Remote

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
        (RawSpec(path="a.ova", remote=HTTPS), {"/etc/own.pem"}, Network.ANY, False),
        (RawSpec(path="a.ova", remote=replace(HTTPS, url="smb://nas/x")), {"/etc/own.pem"}, Network.ANY, True),
        (NbdSpec(uri="nbd+unix:///x?socket=/run/n.sock"), {"/run/n.sock"}, Network.LOCAL, False),
        (NbdSpec(uri="nbds://host/x?tls-certificates=/pki"), {"/pki"}, Network.ANY, False),
    ],
)
def test_what_a_reader_names(reader: ReaderSpec, reads: set[str], network: Network, programs: bool) -> None:
    cage = cage_of(order(reader))
    assert (set(cage.reads), cage.network, cage.programs) == (reads, network, programs)
    assert set(cage.writes) == {"/volumes/one", *([tempfile.gettempdir()] if programs else [])}
    assert not cage.as_root


def test_an_nfs_server_is_asked_as_root() -> None:
    cage = cage_of(order(NfsSpec(host="h", export="/e", path="d")))
    assert (cage.as_root, cage.network, cage.programs) == (True, Network.ANY, False)


def test_each_kind_of_reader_has_a_cage() -> None:
    """A new kind is allowed programs and the network until somebody has looked at it: say here which it needs."""
    looked_at = {*caging._HERE, *caging._CONNECTING, RawSpec, specs.VddkSpec, specs.IscsiSpec}
    looked_at |= {specs.Qcow2WriterSpec}  # no order to copy has one
    kinds = {found for found in vars(specs).values() if isinstance(found, type) and issubclass(found, specs.Spec)}
    assert kinds - {specs.Spec} <= looked_at
