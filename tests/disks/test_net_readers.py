"""Disks that come over NFS and iSCSI from real servers: the laws of DiskReader, then what servers do wrong."""

import random
import signal
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from synvirt.disks import nfs as nfs_module
from synvirt.disks import open_reader
from synvirt.disks.nfs import knock
from synvirt.disks.specs import AllocatedSpec, IscsiSpec, NfsSpec
from synvirt.disks.vsphere.datastore import FileGone
from synvirt.errors import AuthFailed, DiskReadFailed, SourceUnreachable
from tests.contracts.readers import ReaderCase, ReaderContract
from tests.fakes.prism.iscsi import PREFIX, iscsi_target
from tests.fakes.prism.lab import HERE
from tests.fakes.prism.nfs import nfs_server
from tests.fakes.prism.state import Group, GroupDisk, State

SIZE = (3 << 20) + 512


@pytest.fixture(scope="module")
def content() -> bytes:
    return random.Random(1).randbytes(1 << 20) + bytes(1 << 20) + random.Random(2).randbytes(SIZE - (2 << 20))


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory) -> State:
    return State(tmp_path_factory.mktemp("containers"))


@pytest.fixture(scope="module")
def nfs(tmp_path_factory: pytest.TempPathFactory, container: State, content: bytes) -> Iterator[NfsSpec]:
    folder, state = tmp_path_factory.mktemp("nfs"), container
    state.cluster_list.append(HERE)
    (state.folder / "default" / "disk").write_bytes(content)
    with nfs_server(folder / "server", state) as ports:
        yield NfsSpec(host="127.0.0.1", export="/default", path="/disk", name="disk", nfs_port=ports[0], mount_port=ports[1])


@pytest.fixture(scope="module")
def iscsi(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> Iterator[IscsiSpec]:
    folder = tmp_path_factory.mktemp("iscsi")
    (folder / "containers").mkdir()
    state = State(folder / "containers")
    path = folder / "disk"
    path.write_bytes(content)
    with iscsi_target(folder / "server", state) as portal:
        group = Group("1", "disks", "c")
        state.on_group("made", group)
        group.disks.append(GroupDisk("1", 1, "", "", SIZE, path))
        state.on_group("disk", group)
        group.clients["1"] = "iqn.2024-01.org.synvirt:host"
        state.on_group("clients", group)
        yield IscsiSpec(
            portal=portal, target=PREFIX + group.target, lun=1, initiator="iqn.2024-01.org.synvirt:host", name="disk"
        )


class TestNfs(ReaderContract):
    @pytest.fixture
    def case(self, nfs: NfsSpec, content: bytes) -> ReaderCase:
        return ReaderCase(open=lambda: open_reader(nfs), content=content)


class TestNfsWithItsZeros(ReaderContract):
    @pytest.fixture
    def case(self, nfs: NfsSpec, content: bytes) -> ReaderCase:
        spec = AllocatedSpec(over=nfs, areas=((2 << 20, SIZE - (2 << 20)), (0, 1 << 19), (1 << 19, 1 << 19)))
        return ReaderCase(open=lambda: open_reader(spec), content=content)


class TestIscsi(ReaderContract):
    @pytest.fixture
    def case(self, iscsi: IscsiSpec, content: bytes) -> ReaderCase:
        return ReaderCase(open=lambda: open_reader(iscsi), content=content)


def test_what_nfs_refuses_is_reported_by_its_cause(nfs: NfsSpec) -> None:
    with pytest.raises(FileGone, match="No such file"):
        open_reader(replace(nfs, path="/nothing"))
    with pytest.raises(AuthFailed, match="does not let this host mount"):
        knock(replace(nfs, export="/elsewhere", path=""))
    with pytest.raises(DiskReadFailed, match="has 3146240 bytes"):
        open_reader(replace(nfs, size_bytes=1 << 20))
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        with pytest.raises(SourceUnreachable, match="accepts no connection"):
            open_reader(replace(nfs, mount_port=closed.getsockname()[1]))


def test_an_nfs_server_that_hangs_while_it_is_read_is_reported_and_found_again(
    nfs: NfsSpec, container: State, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A controller that fails over for longer than we wait: each read fails in time, as the server's silence and not as an
    allow-list's; the same reader goes on once it answers."""
    monkeypatch.setattr(nfs_module, "READ_TIMEOUT_S", 1.0)
    monkeypatch.setattr(nfs_module, "MOUNT_TIMEOUT_S", 1.0)
    monkeypatch.setattr(nfs_module, "RETRY_DELAYS_S", (0.0, 0.0))
    reader, buffer = open_reader(nfs), bytearray(1 << 20)
    try:
        reader.read_into(0, memoryview(buffer))
        container.signal_nfs(signal.SIGSTOP)
        for _ in range(2):  # on the connection that it had, then on none
            with pytest.raises(SourceUnreachable, match=r"127\.0\.0\.1 was lost while disk was read by NFS at offset 0"):
                reader.read_into(0, memoryview(buffer))
        # A stranger's mount hangs like this: a host that was never let in gets that as the error.
        with pytest.raises(AuthFailed, match="no answer within 1 s"):
            open_reader(nfs)
        container.signal_nfs(signal.SIGCONT)
        monkeypatch.undo()  # a loaded machine answers in its own time
        reader.read_into(0, memoryview(buffer))
        assert bytes(buffer) == content[: 1 << 20]
    finally:
        container.signal_nfs(signal.SIGCONT)
        reader.close()


def test_what_iscsi_refuses_is_reported_by_its_cause(iscsi: IscsiSpec, tmp_path: Path) -> None:
    with pytest.raises(DiskReadFailed, match=r"arget not found|Failed to"):
        open_reader(replace(iscsi, target=f"{iscsi.target}x"))
    with pytest.raises(DiskReadFailed, match="and the disk"):
        open_reader(replace(iscsi, size_bytes=SIZE + (1 << 20)))
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        with pytest.raises(SourceUnreachable, match="accepts no iSCSI connection"):
            open_reader(replace(iscsi, portal=f"127.0.0.1:{closed.getsockname()[1]}"))
