"""wmi_api against a cluster of Hyper-V hosts: which node has a VM, also while it moves or its node is down."""

import random
from collections.abc import Awaitable, Callable, Iterator
from threading import Event
from typing import Any
from uuid import uuid4

import pytest

from synvirt.errors import SourceUnreachable, VmNotFound
from synvirt.live.hyperv.adapter import WmiApi
from tests.contracts.live import in_session
from tests.fakes.hyperv.host import FakeHost
from tests.fakes.hyperv.model import FakeVm
from tests.fakes.hyperv.wsman import Wsman, served


class Cluster:
    """Two nodes that are up, and one that is down. `asking` and `asked` are called with the node and the script, before and
    after each answer."""

    def __init__(self, host: FakeHost, vm: FakeVm) -> None:
        self.host, self.model, self.vm = host, host.hyperv, vm
        self.asking: Callable[[str, str], None] = lambda _node, _script: None
        self.asked: Callable[[str, str], None] = lambda _node, _script: None
        self.nodes = {node: Wsman(self._answers(node), host.wsman.user, host.wsman.password) for node in ("NODE1", "NODE2")}
        self.options: dict[str, Any] = {}

    def _answers(self, node: str) -> Callable[[str, dict[str, Any]], Any]:
        answers = self.model.answers(node)

        def answer(name: str, parameters: dict[str, Any]) -> Any:
            self.asking(node, name)
            try:
                return answers(name, parameters)
            finally:
                self.asked(node, name)

        return answer

    def ask(self, use: Callable[[WmiApi], Awaitable[Any]]) -> Any:
        return in_session(lambda: WmiApi(self.host.access(**self.options)), use)


@pytest.fixture
def cluster(hyperv: FakeHost) -> Iterator[Cluster]:
    vm = hyperv.hyperv.add_vm(f"vm-{uuid4().hex[:8]}", random.Random(1).randbytes(1 << 20))
    made = Cluster(hyperv, vm)
    certificate = (str(hyperv.certificate.certificate), str(hyperv.certificate.key))
    made.model.nodes, vm.node = {"NODE1": True, "NODE2": True, "NODE3": False}, "NODE1"
    try:
        with served(made.nodes["NODE1"], certificate) as one, served(made.nodes["NODE2"], certificate) as two:
            made.options = {"nodes": f"node1=127.0.0.1:{one};NODE2=127.0.0.1:{two}"}
            yield made
    finally:
        made.model.nodes, vm.node = {}, ""


def test_a_vm_is_found_on_the_node_that_has_it_and_after_a_fail_over(cluster: Cluster) -> None:
    vm = cluster.vm

    async def use(adapter: WmiApi) -> tuple[Any, str, str]:
        rows = await adapter.list_vms()
        first = (await adapter.inspect(vm.id)).host
        vm.node = "NODE2"
        moved = (await adapter.inspect(vm.id)).host
        vm.node = "NODE1"
        cluster.nodes["NODE2"].faults["hang_up"] = 2  # the node goes down under us
        return rows, first, moved + (await adapter.inspect(vm.id)).host

    rows, first, moved = cluster.ask(use)
    assert [(row.vm_id, row.folder) for row in rows if row.vm_id == vm.id] == [(vm.id, "NODE1")]
    assert (first, moved) == ("NODE1", "NODE2NODE1")
    assert cluster.nodes["NODE1"].shells == {}


@pytest.mark.parametrize("script", ["list", "inspect"])
def test_a_vm_that_moves_while_it_is_looked_for_is_not_gone(cluster: Cluster, script: str) -> None:
    """Between two nodes' lists it is on neither; and after them it is on another one than they said."""
    before, after = ("NODE2", "NODE1") if script == "list" else ("NODE1", "NODE2")
    cluster.vm.node = before

    def asked(node: str, name: str) -> None:
        if (node, name) == ("NODE1", "list"):
            cluster.vm.node = after
            cluster.asked = lambda _node, _name: None

    cluster.asked = asked
    assert cluster.ask(lambda adapter: adapter.inspect(cluster.vm.id)).host == after


def test_a_vm_that_moves_while_the_nodes_are_listed_is_one_vm(cluster: Cluster) -> None:
    def asked(node: str, name: str) -> None:
        if (node, name) == ("NODE1", "list"):
            cluster.vm.node = "NODE2"

    cluster.asked = asked
    rows = cluster.ask(lambda adapter: adapter.list_vms())
    assert [row.host for row in rows if row.vm_id == cluster.vm.id] == ["NODE2"]


def test_a_vm_that_moves_to_a_node_that_was_already_listed_is_not_gone(cluster: Cluster) -> None:
    moved = Event()
    cluster.vm.node = "NODE2"

    def asking(node: str, name: str) -> None:
        if (node, name) == ("NODE2", "list"):
            assert moved.wait(10)

    def asked(node: str, name: str) -> None:
        if (node, name) == ("NODE1", "list"):
            cluster.vm.node = "NODE1"
            moved.set()

    cluster.asking, cluster.asked = asking, asked
    rows = cluster.ask(lambda adapter: adapter.list_vms())
    assert [row.host for row in rows if row.vm_id == cluster.vm.id] == ["NODE1"]


def test_a_vm_whose_node_is_down_is_away_and_not_gone(cluster: Cluster) -> None:
    """It comes up on another one, with what we have made of it: a cleanup must not take that for removed."""
    vm, name = cluster.vm, "synvirt-x-1"
    cluster.ask(lambda adapter: adapter.snapshot(vm.id, name))
    vm.node = "NODE3"
    for nodes in ({"NODE1": True, "NODE2": True, "NODE3": False}, {"NODE1": True, "NODE3": False}):
        cluster.model.nodes = nodes
        with pytest.raises(SourceUnreachable, match="NODE3"):
            cluster.ask(lambda adapter: adapter.cleanup(vm.id, name))
    vm.node = "NODE1"
    cluster.ask(lambda adapter: adapter.cleanup(vm.id, name))
    assert (vm.snapshots, vm.notes) == ([], "")


def test_a_vm_that_no_node_has_is_gone(cluster: Cluster) -> None:
    cluster.model.nodes = {"NODE1": True, "NODE2": True}
    cluster.vm.node = "elsewhere"
    with pytest.raises(VmNotFound, match="none of the cluster's 2 nodes"):
        cluster.ask(lambda adapter: adapter.inspect(cluster.vm.id))
