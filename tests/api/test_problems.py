"""Every refusal is application/problem+json with a code, a detail that names what is wrong, and nothing of the host."""

import errno
import json
import socket
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import pytest
import structlog

from synvirt import errors
from synvirt.errors import SynvirtError
from synvirt.model.plan import MigrationPlan
from synvirt.programs import ProgramFailed
from tests.api.test_migrations import LIVE, OFFLINE
from tests.fakes.service import Service

JSON = {"Content-Type": "application/json"}
SECRET = "/etc/synvirt/secret hunter2"


def assert_problem(response: httpx.Response, status: int, code: str) -> dict[str, Any]:
    assert response.headers["Content-Type"] == "application/problem+json"
    body: dict[str, Any] = response.json()
    assert set(body) == {"type", "title", "status", "code", "detail", "hint"}
    assert (response.status_code, body["status"], body["code"]) == (status, status, code), body
    assert body["title"]
    assert body["detail"]
    return body


WRONG_PLANS: list[tuple[dict[str, Any], str]] = [
    ({**OFFLINE, "mode": "Tepid"}, "plan.mode: must be 'Warm' or 'Cold'"),
    ({**OFFLINE, "surprise": 1}, "plan.surprise: is not a known field"),
    ({**OFFLINE, "skip_disk": []}, "plan.skip_disk: is not a known field; did you mean skip_disks?"),
    ({**OFFLINE, "target": {"memorybytes": 1}}, "plan.target.memorybytes: is not a known field; did you mean memory_bytes?"),
    ({**OFFLINE, "source": {}}, "plan.source: source has exactly one key, Live or Offline"),
    ({**OFFLINE, "source": {"Live": "vim_api", "Offline": "qcow2"}}, "plan.source: source has exactly one key"),
    ({**OFFLINE, "source": {"Offline": "floppy"}}, "plan.source.Offline: must be 'ova_archive'"),
    ({**OFFLINE, "source": {"Live": "vim_api"}}, "a Live source takes source_ref.kind live_vm"),
    ({**OFFLINE, "source_ref": {"kind": "smb"}}, "plan.source_ref: 'kind' must be one of 'live_vm', "),
    ({**OFFLINE, "source_ref": {"kind": "offline_host_path"}}, "plan.source_ref.path: is required"),
    ({**OFFLINE, "source_ref": {"kind": "offline_host_path", "path": ""}}, "plan.source_ref.path: "),
    ({**LIVE, "source_ref": {**LIVE["source_ref"], "source_id": "x"}}, "plan.source_ref.source_id: "),
    ({**OFFLINE, "target": {"cpu_count": 0}}, "plan.target.cpu_count: must be greater than or equal to 1"),
    ({**OFFLINE, "target": {"cpu_count": "4"}}, "plan.target.cpu_count: must be a valid integer"),
    ({**OFFLINE, "target": {"start": "yes"}}, "plan.target.start: must be a valid boolean"),
    ({**OFFLINE, "name": "a\nb"}, "plan.name: "),
    ({**OFFLINE, "limits": {"bandwidth_bps": 1}}, "plan.limits.bandwidth_bps: "),
    ({"source": OFFLINE["source"]}, "plan.source_ref: is required; plan.mode: is required"),
]


@pytest.mark.parametrize(("plan", "reported"), WRONG_PLANS, ids=[reported for _, reported in WRONG_PLANS])
def test_a_wrong_plan_names_the_field(refusing: httpx.Client, plan: dict[str, Any], reported: str) -> None:
    response = refusing.post("/migrations", content=json.dumps({"plan": plan}), headers=JSON)
    assert reported in assert_problem(response, 400, "E_MIG_INVALID_PLAN")["detail"]


TWICE = json.dumps({"plan": OFFLINE}).encode().replace(b'"mode"', b'"mode": "Warm", "mode"')

WRONG_BODIES: list[tuple[bytes, str]] = [
    (b"", "the body: is not JSON"),
    (b"{", "the body: is not JSON"),
    (b"nonsense", "the body: is not JSON"),
    (b"\xff\xfe", "the body: is not JSON"),
    (b'{"plan": {"name": "\\ud800"}}', "the body: is not JSON"),
    (b"{}", "plan: is required"),
    (b'{"plan": ' + b"9" * 5000 + b"}", "the body: is not JSON: number out of range"),
    (b"[]", "the body: must be an object"),
    (b'{"plan": {}, "plane": 1}', "plane: is not a known field"),
    (b"[" * 100_000, "the body: is not JSON: recursion limit exceeded"),
    (b'{"a":' * 100_000, "the body: is not JSON: recursion limit exceeded"),
    (b'{"' + b"x" * 100_000 + b'": 1}', "x: is not a known field"),
    (b" " * ((1 << 20) + 1), "the body is over 1048576 bytes"),
    (TWICE, "mode: is given more than once"),
]


@pytest.mark.parametrize(("body", "reported"), WRONG_BODIES, ids=[f"{body[:20]!r}" for body, _ in WRONG_BODIES])
def test_a_wrong_body(refusing: httpx.Client, body: bytes, reported: str) -> None:
    response = refusing.post("/migrations", content=body, headers=JSON)
    assert response.json()["code"] in ("E_MIG_BAD_REQUEST", "E_MIG_INVALID_PLAN")
    assert reported in assert_problem(response, 400, response.json()["code"])["detail"]
    assert len(response.content) < 2000


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_a_number_that_is_none(refusing: httpx.Client, number: str) -> None:
    body = f'{{"plan": {{"source": {{"Offline": "qcow2"}}, "mode": "Cold", "warm": {{"interval_s": {number}}}}}}}'
    assert_problem(refusing.post("/migrations", content=body, headers=JSON), 400, "E_MIG_INVALID_PLAN")


def test_many_mistakes_are_reported_in_part(refusing: httpx.Client) -> None:
    body = {"plan": {**OFFLINE, "target": {f"field{number}": 1 for number in range(1000)}}}
    detail = assert_problem(refusing.post("/migrations", json=body), 400, "E_MIG_INVALID_PLAN")["detail"]
    assert detail.endswith("and 995 more")


def test_a_body_without_an_announced_length_is_bounded(refusing: httpx.Client) -> None:
    def endless() -> Iterator[bytes]:
        for _ in range(40):
            yield b" " * 65536

    response = refusing.post("/migrations", content=endless(), headers=JSON)
    assert "over 1048576 bytes" in assert_problem(response, 400, "E_MIG_BAD_REQUEST")["detail"]


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/xml", "application/x-www-form-urlencoded", "json"])
def test_a_body_that_is_not_said_to_be_json(refusing: httpx.Client, content_type: str | None) -> None:
    headers = {"Content-Type": content_type} if content_type else {}
    response = refusing.post("/migrations", content=b'{"plan": {}}', headers=headers)
    assert "Content-Type" in assert_problem(response, 415, "E_MIG_BAD_REQUEST")["detail"]


def test_each_operation_refuses_a_body_of_another_type(service: Service, client: httpx.Client) -> None:
    """The document says so too. Peers send packs, which are of no type."""
    for path, operations in service.app.openapi()["paths"].items():
        for method, operation in operations.items():
            if "requestBody" not in operation or "/peer/" in path:
                continue
            some = "/".join(str(UUID(int=1)) if part.startswith("{") else part for part in path.split("/"))
            code = "E_BAK_BAD_REQUEST" if "/backup/" in path else "E_MIG_BAD_REQUEST"
            answer = client.request(method, f"http://synvirt{some}", content=b"{}", headers={"Content-Type": "text/plain"})
            assert assert_problem(answer, 415, code)["hint"], path
            assert "415" in operation["responses"]


def test_json_with_a_charset_is_json(refusing: httpx.Client) -> None:
    response = refusing.post("/migrations", content=b"{}", headers={"Content-Type": "application/json; charset=utf-8"})
    assert "plan: is required" in assert_problem(response, 400, "E_MIG_BAD_REQUEST")["detail"]


def test_no_route_and_no_method(refusing: httpx.Client) -> None:
    assert "/nowhere" in assert_problem(refusing.get("/nowhere"), 404, "E_MIG_NOT_FOUND")["detail"]
    assert_problem(refusing.get("/migrations/"), 404, "E_MIG_NOT_FOUND")
    response = refusing.delete("/migrations")
    assert assert_problem(response, 405, "E_MIG_BAD_REQUEST")["title"] == "Method Not Allowed"
    assert response.headers["Allow"] == "GET, HEAD, POST"
    assert refusing.put(f"/migrations/{UUID(int=1)}/cancel").headers["Allow"] == "POST"


CODES = [
    (errors.BadRequest, 400),
    (errors.InvalidPlan, 400),
    (errors.UnsupportedFormat, 400),
    (errors.MalformedArchive, 400),
    (errors.HostPathRejected, 400),
    (errors.NotFound, 404),
    (errors.VmNotFound, 404),
    (errors.UploadNotFound, 404),
    (errors.Conflict, 409),
    (errors.UploadTooLarge, 413),
    (errors.UploadRejected, 422),
    (errors.SourceUnreachable, 502),
    (errors.AuthFailed, 502),
    (errors.PersistFailed, 500),
    (errors.Internal, 500),
]


@pytest.mark.parametrize(("error", "status"), CODES, ids=[error.__name__ for error, _ in CODES])
def test_each_error_of_ours_has_its_code_detail_and_hint(tmp_path: Path, error: type[SynvirtError], status: int) -> None:
    body = _answer(tmp_path, error("web.ova is 3 bytes", hint="look at it"), status, error.code)
    assert (body["detail"], body["hint"], body["title"]) == ("web.ova is 3 bytes", "look at it", error.title())


def test_what_is_unexpected_tells_an_incident_and_nothing_else(tmp_path: Path) -> None:
    with structlog.testing.capture_logs() as logs:
        body = _answer(tmp_path, ValueError(SECRET), 500, "E_MIG_INTERNAL")
    assert "hunter2" not in str(body)
    [incident] = [entry for entry in logs if entry["event"] == "unexpected error"]
    assert incident["incident"] in body["detail"]
    assert SECRET in str(incident["exc_info"])


@pytest.mark.parametrize(
    "error", [OSError(errno.EMFILE, "Too many open files", SECRET), RuntimeError("can't start new thread")], ids=str
)
def test_what_the_host_lacks_is_named(tmp_path: Path, error: Exception) -> None:
    with structlog.testing.capture_logs():
        body = _answer(tmp_path, error, 500, "E_MIG_INTERNAL")
    assert "hunter2" not in str(body)
    assert (getattr(error, "strerror", None) or str(error)) in body["detail"]
    assert "LimitNOFILE" in body["hint"]


def test_the_words_of_an_outside_program_stay_in_the_log(tmp_path: Path) -> None:
    with structlog.testing.capture_logs():
        body = _answer(tmp_path, ProgramFailed("qemu-img", 1, SECRET), 500, "E_MIG_INTERNAL")
    assert "hunter2" not in str(body)


def _answer(data_dir: Path, error: Exception, status: int, code: str) -> dict[str, Any]:
    """What POST /migrations answers when the plan's check raises `error`."""

    def check(plan: MigrationPlan) -> None:
        raise error

    service = Service(data_dir, check=check)
    with service.served(), service.local() as client:
        body = assert_problem(client.post("/migrations", json={"plan": OFFLINE}), status, code)
        assert client.get("/migrations").status_code == 200
    service.close()
    return body


def test_a_store_that_fails_is_reported_as_such(service: Service, client: httpx.Client) -> None:
    database = service.settings.data_dir / "migrator.db"
    with sqlite3.connect(database) as connection:
        connection.execute("ALTER TABLE migrations RENAME TO lost")
    connection.close()
    body = assert_problem(client.get("/migrations"), 500, "E_MIG_PERSIST_FAILED")
    assert str(service.settings.data_dir) not in str(body)
    assert_problem(client.get(f"/migrations/{UUID(int=1)}"), 500, "E_MIG_PERSIST_FAILED")


def test_an_unknown_id_is_answered_in_the_same_words_whatever_its_form(service: Service, client: httpx.Client) -> None:
    """By each operation on one thing; and with where to look. Of peers, which are programs, only theirs know their files."""
    for path, operations in service.app.openapi()["paths"].items():
        parameters = [part for part in path.split("/") if part.startswith("{")]
        if len(parameters) != 1 or "/peer/" in path or path.endswith("/take-over"):  # there is one host here
            continue
        for method, operation in operations.items():
            said = set()
            for unknown in (str(UUID(int=1)), "xyz"):
                optional = not operation.get("requestBody", {}).get("required")
                body = {} if optional else {"content": b"{}", "headers": JSON}
                answer = client.request(method, f"http://synvirt{path.replace(parameters[0], unknown)}", **body)  # type: ignore[arg-type]
                if not optional and answer.status_code == 400:
                    break  # its fields come first
                code = "E_MIG_UPLOAD_NOT_FOUND" if "/uploads/" in path else "E_MIG_NOT_FOUND"
                problem = assert_problem(answer, 404, "E_BAK_NOT_FOUND" if "/backup/" in path else code)
                assert problem["hint"], (method, path)
                said.add((problem["detail"].replace(f"'{unknown}'", "ID").replace(unknown, "ID"), problem["hint"]))
            assert len(said) <= 1, (method, path, said)


def test_a_wrong_method_is_told_which_are_right(refusing: httpx.Client) -> None:
    problem = assert_problem(refusing.put(f"/migrations/{UUID(int=1)}"), 405, "E_MIG_BAD_REQUEST")
    assert problem["hint"] == "it takes DELETE, GET, HEAD"


@pytest.mark.parametrize(
    "sent",
    [
        b"GET\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01",
        b"POST /api/v1/migrator/migrations HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nX: \x00\r\n\r\n",
    ],
)
def test_what_is_no_http_gets_a_problem_too(service: Service, sent: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as caller:
        caller.settimeout(60)
        caller.connect(str(service.settings.socket_path))
        caller.sendall(sent)
        answer = b"".join(iter(lambda: caller.recv(65536), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"application/problem+json" in head
    assert b"connection: close" in head.lower()
    found = json.loads(body)
    assert (found["status"], found["code"]) == (400, "E_MIG_BAD_REQUEST")
    assert found["hint"]


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("../../secret", "leads out of the import root"),
        ("a\0b", "is not a file name"),
        ("x" * 300, "is longer than a file's name may be"),
    ],
)
def test_a_path_that_is_refused_has_the_reason_and_a_hint(refusing: httpx.Client, path: str, why: str) -> None:
    body = assert_problem(refusing.post("/host-files/inspect", json={"path": path}), 400, "E_MIG_HOST_PATH_REJECTED")
    assert why in body["detail"]
    assert body["hint"]
