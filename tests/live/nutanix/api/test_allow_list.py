"""Which hosts a cluster lets mount its containers."""

import socket
import time
from functools import partial
from pathlib import Path

import pytest

from synvirt.disks.specs import NfsSpec
from synvirt.errors import AuthFailed
from synvirt.live.nutanix import snapshots
from synvirt.live.nutanix.adapter import PrismApi
from tests.contracts.live import read
from tests.fakes.prism.server import Prisms
from tests.live.nutanix.api.lab import ask, content, machine, opened


def test_a_host_that_is_not_on_the_allow_list_is_reported_when_the_job_is_planned(by_nfs: Prisms) -> None:
    vm = machine(by_nfs)
    by_nfs.state.cluster_list.clear()
    by_nfs.state.on_list()
    manifest = ask(by_nfs.access("element"), lambda adapter: adapter.inspect(vm.id))
    assert "does not let this host mount /default" in str(manifest.cbt_reason)


def test_a_host_may_put_itself_on_the_list_and_takes_itself_off_again(by_nfs: Prisms, tmp_path: Path) -> None:
    """Of a container that inherits: nobody else loses his place meanwhile, and it inherits again in the end."""
    vm, state = machine(by_nfs), by_nfs.state
    state.cluster_list[:] = ["127.0.0.7/255.255.255.255"]
    state.on_list()
    access = by_nfs.access("element", folder=tmp_path / "own", extend_allow_list=True, client_address="127.0.0.1")
    spec = ask(access, lambda adapter: opened(adapter, vm.id))
    assert state.listed("default") == ["127.0.0.7/255.255.255.255", "127.0.0.1/255.255.255.255"]
    assert read(spec)[0] == content()
    ask(access, lambda adapter: adapter.cleanup(vm.id, "synvirt-a-1"))
    kept = state.containers["default"]
    assert (kept["nfs_whitelist"], kept["nfs_whitelist_inherited"]) == ([], True)
    assert list((tmp_path / "own").iterdir()) == []


def test_what_others_did_to_the_list_meanwhile_stays(by_nfs: Prisms, tmp_path: Path) -> None:
    vm, state = machine(by_nfs), by_nfs.state
    state.containers["default"] |= {"nfs_whitelist": ["127.0.0.7/255.255.255.255"], "nfs_whitelist_inherited": False}
    state.on_list()
    access = by_nfs.access("element", folder=tmp_path / "own", extend_allow_list=True, client_address="127.0.0.1")
    ask(access, lambda adapter: opened(adapter, vm.id))
    state.containers["default"]["nfs_whitelist"].append("127.0.0.8/255.255.255.255")
    ask(access, lambda adapter: adapter.cleanup(vm.id, "synvirt-a-1"))
    assert state.listed("default") == ["127.0.0.7/255.255.255.255", "127.0.0.8/255.255.255.255"]


def test_a_list_that_was_put_back_is_not_put_back_twice(by_nfs: Prisms, tmp_path: Path) -> None:
    """A service that was killed between the two: the container inherits again, and nobody is shut out of it."""
    vm, state, own = machine(by_nfs), by_nfs.state, tmp_path / "own"
    state.cluster_list[:] = ["127.0.0.7/255.255.255.255"]
    state.on_list()
    access = by_nfs.access("element", folder=own, extend_allow_list=True, client_address="127.0.0.1")
    ask(access, lambda adapter: opened(adapter, vm.id))
    (note,) = own.glob("allow-list-*")
    kept = note.read_bytes()
    ask(access, lambda adapter: adapter.cleanup(vm.id, "synvirt-a-1"))
    note.write_bytes(kept)
    ask(access, lambda adapter: adapter.cleanup(vm.id, "synvirt-a-1"))
    assert state.listed("default") == ["127.0.0.7/255.255.255.255"]
    assert list(own.iterdir()) == []


@pytest.mark.parametrize("first", ["one", "two"])
def test_each_of_two_hosts_takes_itself_off_whichever_ends_first(
    by_nfs: Prisms, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """The container inherits again, though the second found it with a list of its own."""
    vm, state = machine(by_nfs), by_nfs.state
    state.cluster_list[:] = ["127.0.0.7/255.255.255.255"]
    addresses = {"one": "127.0.0.1", "two": "127.0.0.2"}
    asking: list[str] = []

    def knock(_: NfsSpec) -> None:
        if f"{asking[-1]}/255.255.255.255" not in state.listed("default"):
            raise AuthFailed("it is not on the list")

    monkeypatch.setattr(snapshots, "knock", knock)

    async def cleaned(adapter: PrismApi) -> None:
        await adapter.cleanup(vm.id, f"synvirt-{name}-1")

    hosts = {
        name: by_nfs.access("element", folder=tmp_path / name / "own", extend_allow_list=True, client_address=address)
        for name, address in addresses.items()
    }
    for name, address in addresses.items():
        asking.append(address)
        ask(hosts[name], partial(opened, vm_id=vm.id, name=f"synvirt-{name}-1"))
    assert state.listed("default")[1:] == [f"{address}/255.255.255.255" for address in addresses.values()]
    for name in (first, *({*hosts} - {first})):
        ask(hosts[name], cleaned)
    kept = state.containers["default"]
    assert (kept["nfs_whitelist"], kept["nfs_whitelist_inherited"]) == ([], True)
    assert list(tmp_path.glob("*/own/*")) == []


def test_a_cluster_that_lets_a_strangers_mount_hang_is_reported_in_time(by_nfs: Prisms) -> None:
    """As Nutanix does: it takes the connection, and says nothing."""
    vm = machine(by_nfs)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        access = by_nfs.access("element", mount_port=silent.getsockname()[1])
        began = time.monotonic()
        manifest = ask(access, lambda adapter: adapter.inspect(vm.id))
    assert "no answer within" in str(manifest.cbt_reason)
    assert time.monotonic() - began < 60  # its limit is 10 s; this machine may be busy
