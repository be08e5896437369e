"""Versions, roles, privileges, passing trouble: what Prism says of itself, and what it may do wrong."""

import asyncio
from dataclasses import replace

import pytest

from synvirt.errors import (
    AuthFailed,
    BadRequest,
    Conflict,
    Internal,
    SourceUnreachable,
)
from synvirt.live import GuestStaysOn
from synvirt.live.nutanix.adapter import PrismApi
from synvirt.live.recording import Recording, lines
from synvirt.model.kinds import LiveKind
from synvirt.model.machine import VmManifest
from tests.fakes.prism.server import Prisms
from tests.live.nutanix.api.lab import ask, machine


@pytest.mark.parametrize(("negotiates", "minor"), [(True, 0), (False, 0), (True, 9), (False, 2)])
def test_versions_are_asked_and_not_guessed(cluster: Prisms, negotiates: bool, minor: int) -> None:
    """An older server, one that does not know the question, one that is newer than we are."""
    cluster.central.negotiates, cluster.central.version["vmm"] = negotiates, minor
    machine(cluster)
    ask(cluster.access("central"), lambda adapter: adapter.list_vms())
    assert f"central GET /api/vmm/v4.{min(minor, 3)}/ahv/config/vms" in cluster.seen


def test_who_answers_and_which_ways_are_open_is_reported(by_nfs: Prisms) -> None:
    machine(by_nfs)
    open_ways: dict[tuple[str, ...], dict[str, bool]] = {}
    for which in (("central",), ("element",), ("central", "element")):
        about = ask(by_nfs.access(*which), lambda adapter: adapter.about())
        assert about.product == f"Nutanix Prism {which[0].title()}"
        assert all(check.ok for check in about.checks)
        open_ways[which] = {check.name: not check.warning for check in about.checks if check.name.startswith("way ")}
    assert open_ways == {
        ("central",): {"way nfs": False, "way iscsi": False, "way image": True},
        ("element",): {"way nfs": True, "way iscsi": False, "way image": True},
        ("central", "element"): {"way nfs": True, "way iscsi": False, "way image": True},
    }
    by_nfs.state.data_services = "10.0.0.9"
    about = ask(by_nfs.access("central"), lambda adapter: adapter.about())
    assert "iSCSI" in next(check.detail for check in about.checks if check.name == "ways")


def checks(prisms: Prisms, which: str = "central") -> dict[str, tuple[bool, bool, str]]:
    """(ok, warning, detail) of each."""
    about = ask(prisms.access(which), lambda adapter: adapter.about())
    return {check.name: (check.ok, check.warning, check.detail) for check in about.checks}


def test_a_role_is_reported_by_its_name(cluster: Prisms) -> None:
    machine(cluster)
    assert checks(cluster)["role"] == (True, False, "mover has the role Prism Admin")
    cluster.central.roles = ["Prism Viewer"]
    assert checks(cluster)["role"] == (False, False, "mover has the role Prism Viewer, which may change nothing")
    cluster.central.roles = ["Cluster Admin", "Prism Viewer"]
    assert checks(cluster)["role"][:2] == (True, False)
    cluster.central.roles = ["our movers"]
    assert checks(cluster)["role"] == (True, True, "mover has the role our movers, of which nothing is known here")


def test_a_role_that_is_not_known_is_no_obstacle(cluster: Prisms) -> None:
    """It comes by a group; it may not be seen; an older Prism Central has no roles of v4."""
    machine(cluster)
    cluster.central.by_group = True
    assert checks(cluster)["role"] == (True, True, "no authorization policy names mover: its role, if any, comes by a group")
    cluster.fault("authz/roles|authn/users", "403", 100)
    assert checks(cluster)["role"][:2] == (True, True)
    assert "cannot list users: 403" in checks(cluster)["role"][2]
    del cluster.central.version["iam"]
    assert checks(cluster)["role"][:2] == (True, True)
    assert "role" not in checks(cluster, "element")


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("config/recovery-points", "privilege: see recovery points"),
        ("config/storage-containers", "privilege: see storage containers"),
        ("config/clusters", "privilege: see clusters"),
        ("config/tasks$", "privilege: see tasks"),
    ],
)
def test_a_list_that_is_not_shown_is_a_privilege_that_lacks(cluster: Prisms, path: str, name: str) -> None:
    machine(cluster)
    cluster.fault(path, "403", 1000)
    ok, _, detail = checks(cluster)[name]
    assert not ok
    assert "403" in detail


def test_a_start_that_moves_no_clock_is_seen_by_the_clusters_counter(cluster: Prisms) -> None:
    """On and off again within what a time stamp tells apart."""
    vm = machine(cluster, power="OFF")
    for which in (("element",), ("central", "element")):
        before = ask(cluster.access(*which), lambda adapter: adapter.last_start(vm.id))
        assert before == ask(cluster.access(*which), lambda adapter: adapter.last_start(vm.id))
        vm.version += 2
        assert before != ask(cluster.access(*which), lambda adapter: adapter.last_start(vm.id))


def test_a_wrong_password_is_reported_at_the_login(cluster: Prisms) -> None:
    for which in ("central", "element"):
        with pytest.raises(AuthFailed):
            ask(cluster.access(which, password="wrong"), lambda adapter: adapter.list_vms())


def test_half_a_login_of_elements_is_refused(cluster: Prisms) -> None:
    access = cluster.access()
    with pytest.raises(BadRequest):
        PrismApi(replace(access, credentials={**access.credentials, "element_user": "admin"}))


def test_a_server_that_is_no_prism_is_reported(cluster: Prisms) -> None:
    cluster.fault("/", "404", 100)
    with pytest.raises(Internal, match="neither"):
        ask(cluster.access("central"), lambda adapter: adapter.list_vms())


@pytest.mark.parametrize("status", ["409", "429", "502", "503", "504", "cut"])
def test_passing_trouble_is_asked_again(cluster: Prisms, status: str) -> None:
    vm = machine(cluster)
    cluster.fault("GET .*vms/", status, 2)
    assert ask(cluster.access("central"), lambda adapter: adapter.inspect(vm.id)).name == "web"


def test_trouble_that_stays_is_reported_with_its_words(cluster: Prisms) -> None:
    vm = machine(cluster)
    cluster.fault("GET .*vms/", "503", 1000)
    with pytest.raises(SourceUnreachable, match="503, a fault of the test's"):
        ask(cluster.access("central"), lambda adapter: adapter.inspect(vm.id))


def test_a_vm_that_changed_meanwhile_is_looked_at_again(cluster: Prisms) -> None:
    """412: somebody else changed it between our look and our wish."""
    vm = machine(cluster)
    cluster.fault("POST .*/shutdown", "412", 2)
    cluster.fault("PUT .*/vms/", "412", 2)
    ask(cluster.access("central"), lambda adapter: adapter.shutdown(vm.id))
    ask(cluster.access("central"), lambda adapter: adapter.mark(vm.id, "moved"))
    assert (vm.power, vm.description) == ("OFF", "moved")


@pytest.mark.parametrize("which", ["central", "element"])
@pytest.mark.parametrize("tools", [False, True])
def test_a_guest_that_is_deaf_is_powered_off(cluster: Prisms, which: str, tools: bool) -> None:
    vm = machine(cluster, deaf=True, tools=tools)
    # The job's own deadline goes before that of its source.
    with pytest.raises(GuestStaysOn, match="after 0 s"):
        ask(cluster.access(which, shutdown_timeout_s=600), lambda adapter: adapter.shutdown(vm.id, "hold", 0))
    ask(cluster.access(which, shutdown_timeout_s=0), lambda adapter: adapter.shutdown(vm.id))
    assert vm.power == "OFF"


@pytest.mark.parametrize("which", ["central", "element"])
def test_a_description_that_has_no_room_for_a_note_stays_whole(cluster: Prisms, which: str) -> None:
    vm = machine(cluster)
    for description, marked in (("theirs " * 150, "theirs " * 150), ("x" * 994, f"{'x' * 994}\nmoved"), ("x" * 995, "x" * 995)):
        vm.description = description
        ask(cluster.access(which), lambda adapter: adapter.mark(vm.id, "moved"))
        assert vm.description == marked


def test_a_cluster_that_lets_nobody_describe_its_vms_costs_no_job(cluster: Prisms) -> None:
    vm = machine(cluster)
    cluster.element.refuses_put = True
    ask(cluster.access("element"), lambda adapter: adapter.mark(vm.id, "moved"))
    assert vm.description == ""


def test_many_questions_at_once_share_a_session(cluster: Prisms) -> None:
    vm = machine(cluster)

    async def use(adapter: PrismApi) -> list[VmManifest]:
        return await asyncio.gather(*(adapter.inspect(vm.id) for _ in range(8)))

    assert len(ask(cluster.access("central"), use)) == 8


def test_a_session_is_recorded_without_secrets_and_names(cluster: Prisms) -> None:
    """As `sources record` asks; what a token opens is never in it."""
    vm = cluster.state.add_vm("payroll-7", {"scsi.0": bytes(1 << 20)}, description="ask Jane")
    recording = Recording()
    for which in ("central", "element"):
        access = replace(cluster.access(which), recorder=recording)
        rows = ask(access, lambda adapter: adapter.list_vms())
        ask(access, lambda adapter: adapter.inspect(vm.id))
    about = ask(cluster.access("element"), lambda adapter: adapter.about())
    reported = "\n".join(lines(recording, LiveKind.PRISM_API, about, [row.name for row in rows], ["s3cret", "mover"]))
    assert len(recording.exchanges) > 4
    assert "/ahv/config/vms" in reported
    assert '"powerState"' in reported or "powerState" in reported
    for kept_back in ("s3cret", "payroll-7", "Jane", vm.id, "50:6b:8d:aa:bb:cc", "10.1.2.3"):
        assert kept_back not in reported, kept_back


def test_a_guest_whose_tools_do_not_answer_is_asked_by_its_power_button(cluster: Prisms) -> None:
    """They are installed, and broken: that is no reason to power it off."""
    vm = machine(cluster, tools=True)
    cluster.fault("guest-shutdown", "400")
    ask(cluster.access("central"), lambda adapter: adapter.shutdown(vm.id))
    assert vm.power == "OFF"
    actions = [line.rpartition("/")[2] for line in cluster.seen if "$actions" in line]
    assert actions == ["guest-shutdown", "shutdown"]


@pytest.mark.parametrize("which", ["central", "element"])
def test_a_guest_that_is_paused_while_it_is_asked_loses_nothing(cluster: Prisms, which: str) -> None:
    vm = machine(cluster, deaf=True)
    vm.power = "PAUSED"
    with pytest.raises(Conflict, match="is suspended"):
        ask(cluster.access(which), lambda adapter: adapter.shutdown(vm.id, timeout_s=0.0))
    assert vm.power == "PAUSED"
