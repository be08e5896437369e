"""pve_api and the API of a cluster: tokens, tickets, privileges, discovery, power. Its machines are on paper."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
from proxmoxer import ProxmoxAPI, ResourceException

from synvirt.errors import AuthFailed, BadRequest, CbtUnsupported, Conflict, Internal, SourceUnreachable, VmNotFound
from synvirt.live import GuestStaysOn, SourceAccess
from synvirt.live.holding import Hold
from synvirt.live.proxmox import api as pve_api_module
from synvirt.live.proxmox import farewell
from synvirt.live.proxmox.adapter import PveApi
from synvirt.live.proxmox.cluster import Cluster as PveCluster
from synvirt.live.proxmox.farewell import Notes
from synvirt.live.proxmox.form import FORM
from synvirt.live.proxmox.node import Node
from synvirt.live.proxmox.reading import Reading
from synvirt.live.sessions import StaysLoggedIn
from synvirt.live.ssh import Door
from tests.contracts.live import in_session
from tests.fakes.pve.cluster import PRIVILEGES, Cluster, Paper, Refused, User
from tests.fakes.pve.server import PveServer
from tests.migrations.jobs.running import Died

T = TypeVar("T")
TOKEN = {"token_id": "mover@pve!synvirt", "token_secret": "t0ken"}
PASSWORD = {"user": "root@pam", "password": "s3cret"}
MANY = 2000


@pytest.fixture
def server(tmp_path: Path) -> Iterator[PveServer]:
    cluster = Cluster(Paper(), nodes={"pve1": "127.0.0.1", "pve2": "127.0.0.2"})
    cluster.add(100, scsi0="local-lvm:vm-100-disk-0,size=32G", ostype="l26", agent="1")
    with PveServer(cluster, tmp_path) as running:
        yield running
        assert running.wrong == [], "the stand-in's answers keep the vendor's schema"


def access(server: PveServer, credentials: dict[str, str] | None = None, **options: Any) -> SourceAccess:
    chosen = {"fingerprint_sha256": server.fingerprint, "shutdown_timeout_s": 1, **options}
    return SourceAccess(server.endpoint, TOKEN if credentials is None else credentials, chosen)


def ask(given: SourceAccess, use: Callable[[PveApi], Awaitable[T]]) -> T:
    return in_session(lambda: PveApi(given), use)


# ── who we are ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("credentials", [TOKEN, PASSWORD], ids=["token", "password"])
def test_a_token_and_a_password_both_get_in_and_may_write(server: PveServer, credentials: dict[str, str]) -> None:
    ask(access(server, credentials), lambda adapter: adapter.mark("100", "migrated to web (42)"))
    assert server.cluster.vms[100].config["description"] == "migrated to web (42)"
    assert server.cluster.vms[100].config["onboot"] == 0


@pytest.mark.parametrize(
    "credentials",
    [{**TOKEN, "token_secret": "wr0ng"}, {**PASSWORD, "password": "wr0ng"}, {**TOKEN, "token_id": "mover@pve!other"}],
)
def test_refused_credentials_are_reported_without_them(server: PveServer, credentials: dict[str, str]) -> None:
    with pytest.raises(AuthFailed) as refused:
        ask(access(server, credentials), lambda adapter: adapter.list_vms())
    assert "wr0ng" not in f"{refused.value} {refused.value.hint}"


def test_a_session_at_rest_keeps_its_ticket(server: PveServer) -> None:
    async def use(adapter: PveApi) -> None:
        assert isinstance(adapter, StaysLoggedIn)
        for _ in range(5):
            await adapter.list_vms()
            await adapter.rest()
        assert server.logins == 1

    ask(access(server, PASSWORD), use)


def test_a_ticket_is_renewed_when_half_its_life_is_over_and_when_it_is_void(
    server: PveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use(adapter: PveApi) -> None:
        assert server.logins == 1
        server.tickets.clear()
        await adapter.list_vms()
        assert server.logins == 2
        monkeypatch.setattr(pve_api_module, "TICKET_GOOD_S", -1.0)
        await adapter.list_vms()
        assert server.logins == 3

    ask(access(server, PASSWORD), use)


def test_another_certificate_than_the_pinned_one_is_refused(server: PveServer) -> None:
    given = access(server, fingerprint_sha256="AA:" * 31 + "AA")
    with pytest.raises(SourceUnreachable, match="not the pinned one"):
        ask(given, lambda adapter: adapter.list_vms())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("credentials", {"user": "root", "password": "s3cret"}),
        ("credentials", {"token_id": "root@pam!mover"}),
        ("credentials", {"token_id": "root", "token_secret": "s3cret"}),
        ("credentials", {}),
        ("endpoint", "ftp://host"),
        ("endpoint", "https://root:s3cret@host"),
        ("options", {"scratch_dir": "/var/lib/x;y"}),
        ("options", {"node_hosts": {"pve1": "-oProxyCommand=x"}}),
        ("options", {"node_hosts": "pve1"}),
    ],
)
def test_a_malformed_source_is_refused_before_anything_is_tried(field: str, value: Any) -> None:
    with pytest.raises(BadRequest) as refused:
        PveApi(replace(SourceAccess("https://pve.example", TOKEN), **{field: value}))
    assert "s3cret" not in str(refused.value)


def test_nodes_addresses_may_be_one_text_as_a_command_line_has_it() -> None:
    read = FORM.read_options({"node_hosts": "pve1=10.0.0.1; pve2=fd00::2"})
    assert read.node_hosts == {"pve1": "10.0.0.1", "pve2": "fd00::2"}


@pytest.mark.parametrize("what", ["inspect", "mark"])
def test_a_vm_that_is_moved_while_it_is_asked_is_not_gone(
    server: PveServer, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """What is left out for a VM that is gone would be left out for it; and its job would fail."""
    vm, found = server.cluster.vms[100], PveCluster.row

    def moved_after(self: PveCluster, vm_id: str) -> dict[str, Any]:
        row = found(self, vm_id)
        vm.node = "pve2"
        return row

    async def use(adapter: PveApi) -> None:
        async def again() -> None:
            if what == "mark":
                await adapter.mark("100", "migrated")
            else:
                await adapter.inspect("100")

        monkeypatch.setattr(PveCluster, "row", moved_after)
        with pytest.raises(SourceUnreachable, match="it is on pve2 now"):
            await again()
        monkeypatch.undo()
        await again()
        del server.cluster.vms[100]
        if what == "mark":
            await again()
        else:
            with pytest.raises(VmNotFound):
                await again()

    ask(access(server), use)


# ── what we may ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_each_missing_privilege_is_reported_by_name_and_path(server: PveServer) -> None:
    server.cluster.users["mover@pve!synvirt"].acl = {"/vms": frozenset({"VM.Audit"}), "/": frozenset({"Sys.Audit"})}
    about = ask(access(server), lambda adapter: adapter.about())
    lacking = {check.name for check in about.checks if not check.ok}
    assert lacking == {"privilege VM.PowerMgmt on /vms", "privilege VM.Config.Options on /vms", "ssh pve1", "ssh pve2"}
    warned = {check.name for check in about.checks if check.warning}
    assert any("Datastore.Audit" in name for name in warned)


def test_rights_on_some_vms_alone_are_enough(server: PveServer) -> None:
    server.cluster.users["mover@pve!synvirt"].acl = {"/vms/100": PRIVILEGES, "/nodes": frozenset({"Sys.Audit"})}
    about = ask(access(server), lambda adapter: adapter.about())
    assert {check.name for check in about.checks if not check.ok} == {"ssh pve1", "ssh pve2"}


def test_a_refused_call_names_the_privilege(server: PveServer) -> None:
    server.cluster.users["mover@pve!synvirt"].acl = {"/": frozenset({"VM.Audit"})}
    with pytest.raises(AuthFailed, match=r"\(/vms/100, VM.Config.Disk.*VM.Config.Options"):
        ask(access(server), lambda adapter: adapter.mark("100", "moved"))


def test_a_cluster_without_quorum_is_waited_for(server: PveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files are read-only while too few of its nodes see each other, for example as one is updated."""

    def no_quorum(vm: object) -> None:
        raise Refused(500, "cluster not ready - no quorum?")

    monkeypatch.setattr(server.cluster, "_refuse_locked", no_quorum)
    with pytest.raises(SourceUnreachable, match="no quorum"):
        ask(access(server), lambda adapter: adapter.mark("100", "moved"))


def test_without_ssh_a_plan_is_refused_before_anything_is_done(server: PveServer) -> None:
    manifest = ask(access(server), lambda adapter: adapter.inspect("100"))
    assert [concern.id for concern in manifest.concerns if concern.category == "Critical"] == ["disks-unreadable"]
    assert not manifest.cbt_available
    assert ask(access(server), lambda adapter: adapter.supports_warm()) is False
    with pytest.raises(CbtUnsupported, match="no SSH"):
        ask(access(server), lambda adapter: adapter.snapshot("100", "synvirt-x-1"))


# ── who is there ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_thousands_of_vms_are_found_with_one_question(server: PveServer) -> None:
    for vmid in range(1000, 1000 + MANY):
        server.cluster.add(vmid, f"pve{vmid % 2 + 1}")

    async def use(adapter: PveApi) -> tuple[int, int, float]:
        before, began = len(server.asked), time.process_time()
        rows = await adapter.list_vms()
        return len(rows), len(server.asked) - before, time.process_time() - began

    found, calls, spent_s = ask(access(server), use)
    print(f"{found} VMs in {spent_s:.3f} s of CPU, the stand-in's own included")
    assert (found, calls) == (MANY + 1, 1)


def test_a_container_is_distinguished(server: PveServer) -> None:
    server.cluster.containers[200] = "pve1"
    assert [row.vm_id for row in ask(access(server), lambda adapter: adapter.list_vms())] == ["100"]
    with pytest.raises(VmNotFound, match="container"):
        ask(access(server), lambda adapter: adapter.inspect("200"))


@pytest.mark.parametrize("vm_id", ["101", "vm-1", "100/config", "../100", ""])
def test_a_vm_that_is_not_there(server: PveServer, vm_id: str) -> None:
    with pytest.raises(VmNotFound):
        ask(access(server), lambda adapter: adapter.inspect(vm_id))


def test_a_node_that_is_off_is_waited_for(server: PveServer) -> None:
    server.cluster.away.add("pve1")
    with pytest.raises(SourceUnreachable, match="No route to host"):
        ask(access(server), lambda adapter: adapter.inspect("100"))


def test_the_agent_gives_system_and_addresses(server: PveServer) -> None:
    server.cluster.vms[100].config["net0"] = "virtio=BC:24:11:00:00:01,bridge=vmbr0,tag=7"
    machines = server.cluster.machines
    assert isinstance(machines, Paper)
    machines.start(100)
    machines.answers["get-osinfo"] = {"id": "debian", "pretty-name": "Debian GNU/Linux 12"}
    card = {"hardware-address": "bc:24:11:00:00:01", "ip-addresses": [{"ip-address": "10.1.2.3", "ip-address-type": "ipv4"}]}
    machines.answers["network-get-interfaces"] = [card]
    manifest = ask(access(server), lambda adapter: adapter.inspect("100"))
    assert manifest.guest_os.name == "Debian GNU/Linux 12"
    assert [(nic.network, nic.ip_addresses) for nic in manifest.nics] == [("vmbr0.7", ("10.1.2.3",))]
    machines.answers["get-host-name"] = {"host-name": "web01"}
    machines.answers["get-fsinfo"] = [{"mountpoint": "/", "type": "ext4", "used-bytes": 5, "total-bytes": 9}]
    assert ask(access(server), lambda adapter: adapter.guest_facts("100")) == {
        "host name": "web01",
        "system": "Debian GNU/Linux 12",
        "addresses of bc:24:11:00:00:01": "10.1.2.3",
        "file system /": "ext4, 5 of 9 bytes",
    }


@pytest.mark.parametrize("agent", ["1", "0"], ids=["that does not run", "that is not configured"])
def test_an_agent_is_asked_for_facts_once(server: PveServer, agent: str) -> None:
    """Before it says so, Proxmox VE waits for it."""
    server.cluster.vms[100].config["agent"] = agent
    server.cluster.machines.start(100)
    assert ask(access(server), lambda adapter: adapter.guest_facts("100")) == {}
    assert len([path for _, path, _ in server.asked if "/agent/" in path]) == 1


# ── off and on ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_locked_vm_is_waited_for(server: PveServer) -> None:
    server.cluster.vms[100].config["lock"] = "backup"
    with pytest.raises(SourceUnreachable, match=r"VM is locked \(backup\)"):
        ask(access(server), lambda adapter: adapter.power_on("100"))


def test_a_task_that_fails_is_reported_in_its_own_words(server: PveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_vmid: int) -> None:
        raise RuntimeError("start failed: QEMU exited with code 1")

    monkeypatch.setattr(server.cluster.machines, "start", fail)
    with pytest.raises(Internal, match="qmstart of VM 100 failed: start failed: QEMU exited with code 1"):
        ask(access(server), lambda adapter: adapter.power_on("100"))


def test_a_vm_under_ha_is_started_by_the_manager(server: PveServer) -> None:
    server.cluster.vms[100].ha = "stopped"
    ask(access(server), lambda adapter: adapter.power_on("100"))
    assert server.cluster.machines.is_running(100)
    assert server.cluster.vms[100].ha == "started"


def test_each_start_is_distinguished_and_nothing_else(server: PveServer) -> None:
    vm = server.cluster.vms[100]

    def last() -> str:
        return ask(access(server), lambda adapter: adapter.last_start("100"))

    before = last()
    server.cluster.note("vzdump", vm)
    server.cluster.note("qmshutdown", vm)
    assert last() == before
    server.cluster.note("qmstart", vm)
    assert (after := last()) != before
    vm.node = "pve2"
    assert last() != after


# ── an independent client ────────────────────────────────────────────────────────────────────────────────────────────


def test_proxmoxer_finds_the_stand_in_to_be_proxmox(server: PveServer) -> None:
    """What is easy to get wrong on both sides at once: where tokens, tickets and parameters go."""
    where = {"host": "127.0.0.1", "port": server.port, "verify_ssl": False}
    user, _, name = TOKEN["token_id"].partition("!")
    clients = [
        ProxmoxAPI(**where, user=user, token_name=name, token_value="t0ken"),
        ProxmoxAPI(**where, user="root@pam", password="s3cret"),
    ]
    for client in clients:
        assert client.version.get()["release"] == "8.4"
        assert [one["vmid"] for one in client.cluster.resources.get(type="vm")] == [100]
        upid = client.nodes("pve1").qemu(100).status.start.post()
        while client.nodes("pve1").tasks(upid).status.get()["status"] != "stopped":
            time.sleep(0.05)
        assert client.nodes("pve1").qemu(100).status.current.get()["status"] == "running"
        client.nodes("pve1").qemu(100).config.put(description="by proxmoxer")
        assert client.nodes("pve1").qemu(100).config.get()["description"] == "by proxmoxer"
        with pytest.raises(ResourceException, match="400"):
            client.nodes("pve1").qemu(100).status.stop.post(forceful=1)
        with pytest.raises(ResourceException, match="does not exist"):
            client.nodes("pve2").qemu(100).config.get()
    server.cluster.users["mover@pve!synvirt"] = User("t0ken", {})
    with pytest.raises(ResourceException, match="403"):
        clients[0].nodes("pve1").qemu(100).config.get()


def test_sessions_may_be_closed_twice_and_unopened(server: PveServer) -> None:
    async def close() -> None:
        adapter = PveApi(access(server))
        await adapter.close()
        await adapter.connect()
        await adapter.close()
        await adapter.close()

    asyncio.run(close())


class Stubborn(Paper):
    """Its guests hear the power button, and stay on."""

    def power_button(self, vmid: int) -> None:
        pass


def test_a_guest_that_was_asked_in_vain_is_powered_off(server: PveServer) -> None:
    """The task that asked it holds the lock of the VM's configuration until its own timeout: nothing else may stop the VM."""
    server.cluster.machines = Stubborn()
    server.cluster.machines.start(100)

    async def use(adapter: PveApi) -> None:
        cluster = adapter._cluster
        row = await asyncio.to_thread(cluster.row, "100")
        asked = await asyncio.to_thread(cluster.ask_off, row, 600)
        while not server.cluster.vms[100].lock_file.locked():
            await asyncio.sleep(0.01)
        with pytest.raises(SourceUnreachable, match="can't lock file"):
            await asyncio.to_thread(cluster.off_by_force, row)
        await asyncio.to_thread(cluster.off_by_force, row, asked)

    ask(access(server), use)
    assert not server.cluster.machines.is_running(100)


@pytest.mark.parametrize(("ha", "asked_s"), [(None, 121), ("started", 86400)])
def test_a_guest_that_is_held_is_powered_off_by_no_manager(server: PveServer, ha: str | None, asked_s: int) -> None:
    """The manager of high availability powers a VM off when the time is over that the guest is given."""
    server.cluster.machines, vm = Stubborn(), server.cluster.vms[100]
    server.cluster.machines.start(100)
    vm.ha = ha

    def no_monitor(_: str) -> Path:
        raise SourceUnreachable("no monitor")

    async def use(adapter: PveApi) -> None:
        cluster = adapter._cluster
        row = await asyncio.to_thread(cluster.row, "100")
        node: Any = SimpleNamespace(name="pve1", socket=no_monitor)
        notes, options = Notes(Path("/nonexistent")), adapter._options
        reading = Reading(
            cluster, node, row, notes=notes, other=lambda _: node, options=options, frozen=lambda: nullcontext(Hold())
        )
        with pytest.raises(GuestStaysOn):
            await asyncio.to_thread(reading.shut_down, 1.0, "hold")

    ask(access(server), use)
    (given,) = [given for _, path, given in server.asked if path.endswith("/status/shutdown")]
    assert given["timeout"] == str(asked_s)
    assert server.cluster.machines.is_running(100)


class Monitored(Stubborn):
    """Its guests are stopped by QEMU's monitor, and go on by it."""

    def __init__(self) -> None:
        super().__init__()
        self.paused: set[int] = set()

    def status(self, vmid: int) -> str:
        return "paused" if vmid in self.paused else super().status(vmid)

    def __enter__(self) -> "Monitored":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def ask(self, command: str, _: object = None) -> dict[str, str]:
        match command:
            case "stop":
                self.paused.add(100)
            case "cont":
                self.paused.discard(100)
        return {"status": self.status(100)}


@pytest.fixture
def stopped(server: PveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Monitored, SourceAccess]:
    """A guest that a service has stopped, and that was killed before it powered the guest off."""
    machines = Monitored()
    server.cluster.machines = machines
    machines.start(100)
    monkeypatch.setattr(Reading, "qmp", lambda _: machines)
    monkeypatch.setattr(Reading, "_kept_alive", lambda _: nullcontext(True))
    given = replace(access(server, {**TOKEN, "ssh_password": "s3cret"}, backup_access=False), folder=tmp_path / "adapter")

    def killed(*_: object) -> None:
        raise Died

    with monkeypatch.context() as patched:
        patched.setattr(farewell, "changes", killed)
        with pytest.raises(Died):
            ask(given, lambda adapter: adapter.shutdown("100"))
    assert machines.paused == {100}
    monkeypatch.setattr(farewell, "changes", lambda *_: {"synvirt-a-1.scsi0": [(0, 512)]})
    return machines, given


def test_a_guest_that_a_killed_service_had_stopped_is_powered_off(
    server: PveServer, stopped: tuple[Monitored, SourceAccess]
) -> None:
    """It is paused, but by nobody who wants its memory; and it hears no request to shut down."""
    machines, given = stopped
    asked = len([path for _, path, _ in server.asked if path.endswith("/status/shutdown")])
    assert ask(given, lambda adapter: adapter.inspect("100")).power_state == "on"
    ask(given, lambda adapter: adapter.shutdown("100"))
    assert not machines.is_running(100)
    assert len([path for _, path, _ in server.asked if path.endswith("/status/shutdown")]) == asked
    assert Notes(given.folder / "proxmox").stopped("100") is None


def test_a_guest_that_a_killed_service_had_stopped_runs_on_where_its_job_is_cancelled(
    stopped: tuple[Monitored, SourceAccess],
) -> None:
    machines, given = stopped
    ask(given, lambda adapter: adapter.power_on("100"))
    assert (machines.is_running(100), machines.paused) == (True, set())
    machines.paused.add(100)  # now by somebody
    assert ask(given, lambda adapter: adapter.inspect("100")).power_state == "suspended"


def test_a_guest_that_was_started_since_and_is_paused_was_paused_by_somebody(
    server: PveServer, stopped: tuple[Monitored, SourceAccess]
) -> None:
    machines, given = stopped
    server.cluster.note("qmstart", server.cluster.vms[100])
    assert ask(given, lambda adapter: adapter.inspect("100")).power_state == "suspended"
    with pytest.raises(Conflict, match="is suspended"):
        ask(given, lambda adapter: adapter.shutdown("100", timeout_s=0.0))
    assert machines.is_running(100)


def test_a_node_that_was_left_is_logged_in_to_by_nobody(tmp_path: Path) -> None:
    """The thread of a call that was cancelled goes on, and an ssh of its own would never be ended."""
    node = Node("pve1", Door("127.0.0.1", 9, "root", tmp_path), tmp_path, "/var/lib/synvirt")
    node.close()
    for use in (lambda: node.run("version"), lambda: node.socket("/run/x"), lambda: node.tunnel("/run/x")):
        with pytest.raises(SourceUnreachable, match="is closed"):
            use()
