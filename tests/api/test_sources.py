"""Sources over HTTP: registered, sealed, tested, discovered, removed. The platform is a fake; a port that is closed is real."""

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest

from synvirt.errors import InvalidPlan, NotFound
from synvirt.live import SourceAccess
from synvirt.live.registry import BY_KIND
from synvirt.model.kinds import LiveKind, State
from tests.fakes.live import FakePlatform
from tests.fakes.platforms import with_fake
from tests.fakes.service import Service
from tests.house import live_plan

SECRET = "correct-horse-battery-staple"
FINGERPRINT = "ab" * 32
VIM = {
    "name": "lab",
    "kind": "vim_api",
    "endpoint": "https://127.0.0.1:1",
    "credentials": {"user": "root", "password": SECRET},
}
FAKE = {"name": "fake", "kind": "libvirt_remote", "endpoint": "qemu:///system"}
FIELDS = {"id", "name", "kind", "endpoint", "options", "created_at", "last_test", "rates"}


@pytest.fixture
def platform(tmp_path: Path) -> FakePlatform:
    return FakePlatform(tmp_path / "platform")


@pytest.fixture
def opened() -> list[SourceAccess]:
    return []


@pytest.fixture
def service(tmp_path: Path, platform: FakePlatform, opened: list[SourceAccess]) -> Iterator[Service]:
    made = Service(tmp_path, has_pages=False, platforms=with_fake(platform, opened))
    with made.served():
        yield made
    made.close()


def add(client: httpx.Client, body: dict[str, Any], **fields: Any) -> dict[str, Any]:
    answer = client.post("/sources", json=body | fields)
    assert answer.status_code == 201, answer.text
    source: dict[str, Any] = answer.json()
    assert answer.headers["location"].endswith(f"/api/v1/migrator/sources/{source['id']}")
    return source


def check(answer: dict[str, Any], name: str) -> dict[str, Any]:
    return next(one for one in answer["checks"] if one["name"] == name)


# ── kept ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_source_is_registered_listed_loaded_and_removed(client: httpx.Client) -> None:
    source = add(client, VIM)
    assert set(source) == FIELDS
    assert (source["name"], source["kind"], source["endpoint"]) == ("lab", "vim_api", "https://127.0.0.1:1")
    assert source["options"].items() >= {"verify_tls": True, "fingerprint_sha256": None}.items()
    assert client.get("/sources").json() == {"items": [source], "next_cursor": None}
    assert client.get(f"/sources/{source['id']}").json() == source
    assert client.delete(f"/sources/{source['id']}").status_code == 204
    assert client.get(f"/sources/{source['id']}").json()["code"] == "E_MIG_NOT_FOUND"
    assert client.delete(f"/sources/{source['id']}").status_code == 404


def test_pages_miss_no_source(client: httpx.Client) -> None:
    made = [add(client, FAKE, name=f"s{number}")["id"] for number in range(5)]
    seen: list[str] = []
    cursor = None
    while True:
        page = client.get("/sources", params={"limit": 2} | ({"cursor": cursor} if cursor else {})).json()
        seen += [one["id"] for one in page["items"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert seen == made[::-1]


def test_a_secret_is_in_no_answer_and_in_no_file(service: Service, client: httpx.Client) -> None:
    source = add(client, VIM)
    answers = [
        client.get("/sources").text,
        client.get(f"/sources/{source['id']}").text,
        client.post(f"/sources/{source['id']}/test").text,
        client.get(f"/sources/{source['id']}/vms").text,
        client.post("/sources", json=VIM | {"name": "other", "credentials": {"password": SECRET}}).text,
        client.post("/sources", json=VIM | {"name": "other", "credentials": {"user": 3, "password": [SECRET]}}).text,
        client.patch(f"/sources/{source['id']}", json={"credentials": {"user": "u", "password": SECRET, "more": SECRET}}).text,
        client.post("/sources", json=VIM | {"endpoint": f"https://root:{SECRET}@host"}).text,
    ]
    assert not [answer for answer in answers if SECRET in answer]
    service.store.close()
    for path in service.settings.data_dir.rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes(), path


def test_the_adapter_gets_the_credentials_back(client: httpx.Client, opened: list[SourceAccess]) -> None:
    source = add(client, FAKE, credentials={"user": "root"})
    assert client.get(f"/sources/{source['id']}/vms").status_code == 200
    assert dict(opened[-1].credentials) == {"user": "root"}
    assert SECRET not in repr(SourceAccess("https://x", {"password": SECRET}))


def test_the_user_may_be_called_as_remote_files_call_it(client: httpx.Client) -> None:
    named = {"username": "root", "password": SECRET}
    source = add(client, VIM, credentials=named)
    assert client.patch(f"/sources/{source['id']}", json={"credentials": named}).status_code == 200
    assert "credentials.user: is required" in client.post("/sources", json=VIM | {"credentials": {"name": "root"}}).text


@pytest.mark.parametrize(
    ("fields", "reported"),
    [
        ({"endpoint": "ftp://host"}, "scheme is 'ftp'"),
        ({"endpoint": "https://"}, "has no host"),
        ({"endpoint": "https://host:99999"}, "not a URL"),
        ({"endpoint": "https://host:0"}, "port 0"),
        ({"endpoint": "vcenter.example"}, "no scheme"),
        ({"endpoint": "https://user@host"}, "contains a user"),
        ({"endpoint": "https://u:p@host"}, "contains a password"),
        ({"credentials": {}}, "credentials.user"),
        ({"credentials": {"user": "u"}}, "credentials.password"),
        ({"credentials": {"user": "u", "password": ""}}, "credentials.password: is empty"),
        ({"credentials": {"user": "u", "password": "p", "x": "y"}}, "credentials.x"),
        ({"credentials": {"user": "u", "password": "p", "username": "v"}}, "credentials.username"),
        ({"options": {"nonsense": 1}}, "options.nonsense"),
        ({"options": {"fingerprint_sha256": "xyz"}}, "options.fingerprint_sha256"),
        ({"kind": "esx"}, "kind"),
        ({"name": ""}, "name"),
        ({"name": "  "}, "name"),
        ({"surprise": True}, "surprise"),
    ],
)
def test_what_has_not_the_form_of_its_kind_is_refused(client: httpx.Client, fields: dict[str, Any], reported: str) -> None:
    answer = client.post("/sources", json=VIM | fields)
    assert (answer.status_code, answer.json()["code"]) == (400, "E_MIG_BAD_REQUEST"), answer.text
    assert reported in answer.json()["detail"]
    assert client.get("/sources").json()["items"] == []


def test_what_a_hand_adds_around_it_is_taken_away(client: httpx.Client) -> None:
    source = add(client, VIM, name="  lab ", endpoint=" https://VCENTER.example/ ")
    assert (source["name"], source["endpoint"]) == ("lab", "https://VCENTER.example/")
    assert client.post("/sources", json=VIM | {"name": "lab "}).status_code == 409


@pytest.mark.parametrize("ports", ["10000-10010", "10000,10010", "10000, 10010", [10000, 10010]])
def test_an_option_of_several_parts_may_be_one_text(client: httpx.Client, ports: object) -> None:
    """As a command line has it."""
    source = add(client, FAKE, options={"nbd_ports": ports})
    assert source["options"]["nbd_ports"] == [10000, 10010]


@pytest.mark.parametrize("ports", ["10000", "10000-10010-10020", "10010-10000", "-", "", "0-5", "x-y"])
def test_an_option_of_too_few_or_wrong_parts_is_refused(client: httpx.Client, ports: str) -> None:
    answer = client.post("/sources", json=FAKE | {"options": {"nbd_ports": ports}})
    assert (answer.status_code, answer.json()["code"]) == (400, "E_MIG_BAD_REQUEST")
    assert "nbd_ports" in answer.text


def test_a_slash_at_the_end_of_an_endpoint_means_nothing() -> None:
    """libvirt would not know the path `/system/`."""
    for kind, endpoint in (("libvirt_remote", "qemu+ssh://root@Host.example:2222/system"), ("vim_api", "https://host")):
        form = BY_KIND[LiveKind(kind)].form
        assert form.place(endpoint + "/") == form.place(endpoint)


def test_two_sources_have_two_names(client: httpx.Client) -> None:
    add(client, VIM)
    answer = client.post("/sources", json=VIM)
    assert (answer.status_code, answer.json()["code"]) == (409, "E_MIG_CONFLICT")


def test_a_change_replaces_what_it_names(client: httpx.Client) -> None:
    source = add(client, VIM)
    path = f"/sources/{source['id']}"
    renamed = client.patch(path, json={"name": "prod", "options": {"fingerprint_sha256": FINGERPRINT}}).json()
    assert renamed["name"] == "prod"
    assert renamed["options"]["fingerprint_sha256"] == ":".join(["AB"] * 32)
    assert renamed["created_at"] == source["created_at"]
    assert client.get(path).json() == renamed
    add(client, VIM)
    assert client.patch(path, json={"name": "lab"}).status_code == 409
    assert client.patch(path, json={"options": {"x": 1}}).status_code == 400
    assert client.patch(path, json={"kind": "pve_api"}).status_code == 400
    assert client.patch(f"/sources/{uuid4()}", json={"name": "x"}).status_code == 404


def test_credentials_follow_no_change_of_address(client: httpx.Client) -> None:
    """Who may change a source could else have its password sent to a host of his own."""
    source = add(client, VIM)
    path = f"/sources/{source['id']}"
    answer = client.patch(path, json={"endpoint": "https://elsewhere"})
    assert (answer.status_code, answer.json()["detail"]) == (400, "credentials: are required with another endpoint")
    moved = client.patch(path, json={"endpoint": "https://elsewhere", "credentials": {"user": "u", "password": "p"}})
    assert moved.json()["endpoint"] == "https://elsewhere"


def test_a_source_that_a_job_reads_from_stays(service: Service, client: httpx.Client) -> None:
    source = add(client, FAKE)
    job = service.submit(live_plan(source_ref={"kind": "live_vm", "source_id": source["id"], "vm_id": "vm-1"}))
    answer = client.delete(f"/sources/{source['id']}")
    assert (answer.status_code, answer.json()["code"]) == (409, "E_MIG_CONFLICT")
    assert str(job.id) in answer.json()["detail"]
    elsewhere = {"endpoint": "qemu+ssh://elsewhere/system", "credentials": {}}
    assert client.patch(f"/sources/{source['id']}", json=elsewhere).status_code == 409
    assert client.patch(f"/sources/{source['id']}", json={"name": "renamed"}).status_code == 200
    service.move(job.id, State.FAILED)
    assert client.delete(f"/sources/{source['id']}").status_code == 204


def test_a_source_of_a_kind_that_is_not_served_is_refused(
    service: Service, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was answered with 201, and so was its plan; then the job failed with E_MIG_INTERNAL."""
    source = add(client, VIM)
    served = {kind: platform for kind, platform in service.sources._platforms.items() if kind is not LiveKind.VIM_API}
    monkeypatch.setattr(service.sources, "_platforms", served)
    answer = client.post("/sources", json=VIM | {"name": "another"})
    assert (answer.status_code, answer.json()["code"]) == (400, "E_MIG_BAD_REQUEST"), answer.text
    assert "vim_api is not served" in answer.json()["detail"]
    assert [one["id"] for one in client.get("/sources").json()["items"]] == [source["id"]]


def test_a_plan_for_a_source_that_is_not_there_or_of_another_kind_is_refused(service: Service, client: httpx.Client) -> None:
    source = add(client, FAKE)
    with pytest.raises(InvalidPlan, match="libvirt_remote"):
        service.sources.check_plan(LiveKind.VIM_API, UUID(source["id"]))
    with pytest.raises(NotFound):
        service.sources.check_plan(LiveKind.VIM_API, uuid4())


def test_rotating_the_key_leaves_every_source_usable(
    service: Service, client: httpx.Client, opened: list[SourceAccess]
) -> None:
    key = service.settings.keyring_dir / "migrator.key"
    before = key.read_bytes()
    sources = [add(client, FAKE, name=f"s{number}", credentials={"user": f"u{number}"}) for number in range(3)]
    assert client.post("/keyring/rotate").json() == {"resealed": 3}
    assert key.read_bytes() != before
    assert not key.with_name("migrator.key.new").exists()
    for source in sources:
        assert client.get(f"/sources/{source['id']}/vms").status_code == 200
    assert [access.credentials["user"] for access in opened] == ["u0", "u1", "u2"]


# ── tested ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_source_that_serves(client: httpx.Client) -> None:
    source = add(client, FAKE)
    answer = client.post(f"/sources/{source['id']}/test").json()
    assert set(answer) == {"ok", "product", "version", "latency_ms", "checks", "at"}
    assert (answer["ok"], answer["product"]) == (True, "the fake platform")
    assert answer["latency_ms"] >= 0
    assert [one["name"] for one in answer["checks"]] == ["login", "platform"]
    assert client.get(f"/sources/{source['id']}").json()["last_test"] == answer


def test_a_closed_port_is_reported_with_what_to_do(client: httpx.Client) -> None:
    with socket.socket() as held:  # bound and not listening: nobody else takes the port, and it refuses
        held.bind(("127.0.0.1", 0))
        source = add(client, VIM, endpoint=f"https://127.0.0.1:{held.getsockname()[1]}")
        answer = client.post(f"/sources/{source['id']}/test").json()
    assert not answer["ok"]
    assert check(answer, "address")["ok"]
    assert not check(answer, "port")["ok"]
    assert "Connection refused" in check(answer, "port")["detail"]
    assert "firewall" in check(answer, "port")["hint"]


def test_a_name_without_an_address_is_reported(client: httpx.Client) -> None:
    source = add(client, VIM, endpoint="https://no-such-host.invalid")
    answer = client.post(f"/sources/{source['id']}/test").json()
    assert [one["name"] for one in answer["checks"]] == ["address"]
    assert not answer["ok"]
    assert "DNS" in answer["checks"][0]["hint"]


def test_a_wrong_password_is_a_failed_check(client: httpx.Client, platform: FakePlatform) -> None:
    source = add(client, FAKE)
    platform.fault("wrong_password", 1)
    answer = client.post(f"/sources/{source['id']}/test").json()
    assert not answer["ok"]
    assert check(answer, "login")["detail"].startswith("E_MIG_AUTH_FAILED: ")
    platform.fault("wrong_password", 1)
    refused = client.get(f"/sources/{source['id']}/vms")
    assert (refused.status_code, refused.json()["code"]) == (502, "E_MIG_AUTH_FAILED")


def test_a_deep_test_reads_from_a_snapshot_and_leaves_none(client: httpx.Client, platform: FakePlatform) -> None:
    platform.add_vm("vm-1", {"disk-0": bytes(1 << 20)})
    source = add(client, FAKE)
    answer = client.post(f"/sources/{source['id']}/test", params={"deep": True}).json()
    assert answer["ok"]
    assert [one["name"] for one in answer["checks"]][2:] == ["choose", "snapshot", "read", "cleanup"]
    assert "1048576 bytes" in check(answer, "read")["detail"]
    assert platform.vm("vm-1")["snapshots"] == {}


def test_a_deep_test_that_fails_leaves_no_snapshot(client: httpx.Client, platform: FakePlatform) -> None:
    platform.add_vm("vm-1", {"disk-0": bytes(1 << 20)})
    source = add(client, FAKE)
    platform.fault("snapshot_failed", 1)
    answer = client.post(f"/sources/{source['id']}/test", params={"deep": True, "vm_id": "vm-1"}).json()
    assert not answer["ok"]
    assert check(answer, "cleanup")["ok"]
    assert platform.vm("vm-1")["snapshots"] == {}
    assert not client.post(f"/sources/{source['id']}/test", params={"deep": True, "vm_id": "vm-9"}).json()["ok"]


def test_without_the_control_plane_a_vsphere_source_answers_internal(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SYNVIRT_MIGRATOR_SKIP_GO_SHIM", "1")
    source = add(client, VIM)
    for path in ("vms", "vms/vm-1"):
        answer = client.get(f"/sources/{source['id']}/{path}")
        assert (answer.status_code, answer.json()["code"]) == (500, "E_MIG_INTERNAL")
        assert "SYNVIRT_MIGRATOR_SKIP_GO_SHIM" in answer.json()["detail"]


# ── discovered ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_discovery_is_paged_by_name_and_asks_the_platform_once(
    client: httpx.Client, platform: FakePlatform, opened: list[SourceAccess], monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(7):
        platform.add_vm(f"vm-{number}", {})
    source = add(client, FAKE)
    path = f"/sources/{source['id']}/vms"
    seen: list[str] = []
    cursor = None
    while True:
        page = client.get(path, params={"limit": 3} | ({"cursor": cursor} if cursor else {})).json()
        seen += [vm["vm_id"] for vm in page["items"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
        platform.add_vm(f"vm-0{len(seen)}", {})  # what comes in between is on no later page
    assert seen == [f"vm-{number}" for number in range(7)]
    assert len(opened) == 1
    assert [vm["vm_id"] for vm in client.get(path, params={"search": "M-0"}).json()["items"]] == ["vm-0"]
    assert len(opened) == 1, "a moment ago it was asked"
    monkeypatch.setattr("synvirt.migrations.sources.registered.LISTING_FRESH_S", 0.0)
    found = client.get(path, params={"search": "M-0"}).json()["items"]
    assert [vm["vm_id"] for vm in found] == ["vm-0", "vm-03", "vm-06"]
    assert len(opened) == 2
    assert set(found[0]) >= {"vm_id", "name", "power_state", "cpu_count", "memory_bytes"}


def test_vms_that_come_and_go_shift_no_page_of_a_discovery(
    client: httpx.Client, platform: FakePlatform, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another caller has asked for the first page meanwhile, or a minute is over: the platform is asked again."""
    monkeypatch.setattr("synvirt.migrations.sources.registered.LISTING_KEPT_S", 0.0)
    for name in ("a", "b", "c", "Dé 1"):
        platform.add_vm(name, {})
    path = f"/sources/{add(client, FAKE)['id']}/vms"
    first = client.get(path, params={"limit": 2}).json()
    platform.remove_vm("a")
    platform.add_vm("aa", {})
    second = client.get(path, params={"limit": 1, "cursor": first["next_cursor"]}).json()
    platform.remove_vm("c")
    third = client.get(path, params={"limit": 1, "cursor": second["next_cursor"]}).json()
    assert [[vm["vm_id"] for vm in page["items"]] for page in (first, second, third)] == [["a", "b"], ["c"], ["Dé 1"]]
    assert third["next_cursor"] is None
    for foreign in ("1", "é", "====", "YWJj", "x" * 5000):
        refused = client.get(path, params={"cursor": foreign})
        assert (refused.status_code, refused.json()["code"]) == (400, "E_MIG_BAD_REQUEST")


def test_inspection_answers_a_manifest(client: httpx.Client, platform: FakePlatform) -> None:
    platform.add_vm("vm-1", {"disk-0": bytes(4096)})
    source = add(client, FAKE)
    manifest = client.get(f"/sources/{source['id']}/vms/vm-1").json()
    assert (manifest["vm_id"], manifest["cbt_available"]) == ("vm-1", True)
    missing = client.get(f"/sources/{source['id']}/vms/vm-2")
    assert (missing.status_code, missing.json()["code"]) == (404, "E_MIG_VM_NOT_FOUND")
    assert client.get(f"/sources/{uuid4()}/vms/vm-1").status_code == 404
    assert client.get("/sources/none/vms").status_code == 404


def test_a_source_that_is_away_is_a_bad_gateway(client: httpx.Client, platform: FakePlatform) -> None:
    source = add(client, FAKE)
    platform.fault("unreachable", 1)
    answer = client.get(f"/sources/{source['id']}/vms")
    assert (answer.status_code, answer.json()["code"]) == (502, "E_MIG_SOURCE_UNREACHABLE")
