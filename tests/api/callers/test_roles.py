"""Every route by every role; tokens; the audit trail."""

import base64
import hashlib
import json
import re
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import unquote
from uuid import UUID

import httpx
import pytest
from fastapi.routing import APIRoute
from pydantic import SecretStr
from sqlalchemy import delete, update

from synvirt import outgoing
from synvirt.accounts import Role
from synvirt.api.callers.auth import Remembering, Throttled
from synvirt.api.callers.networks import network_of
from synvirt.api.callers.roles import connects_out, needed_role
from synvirt.api.routes.audit import AuditVerified, expiring, verified
from synvirt.backups import repositories
from synvirt.backups.model import BackupRepositoryRequest
from synvirt.errors import PersistFailed, Unauthorized
from synvirt.model.kinds import LiveKind, State
from synvirt.model.plan import MigrationPlan
from synvirt.model.sources import SourceRequest
from synvirt.model.submitter import Submitter
from synvirt.model.values import now
from synvirt.repository.folder import HostFolder
from synvirt.store.access import AuditEntry, Link, broken_at, link_of
from synvirt.store.tables import audit
from tests.fakes.service import PLAN, PREFIX, Service, every_role

API = "/api/v1"
ID = "00000000-0000-0000-0000-000000000001"


def basic(user: str) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"{user}:pw".encode()).decode()}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Service, httpx.Client]]:
    """One account a role, named after it, in clear on loopback."""
    folder = tmp_path_factory.mktemp("service")
    accounts = every_role(folder / "users", "pw")
    service = Service(folder, check_password=Throttled(accounts), role_of=accounts.role_of, tls=False)
    with service.served() as server, httpx.Client(base_url=server.address, timeout=60) as client:
        yield service, client
    service.close()


def routes(service: Service) -> list[tuple[str, str]]:
    """Method and path of everything that is served, pages too, with an id for each parameter."""
    found = []
    for path, methods in _all(service.app.routes):
        plain = path
        for parameter in [part for part in path.split("/") if part.startswith("{")]:
            plain = plain.replace(parameter, ID)
        found += [(method, plain) for method in methods if method != "HEAD"]
    return sorted(set(found))


def _all(listed: Any) -> Iterator[tuple[str, set[str]]]:
    for route in listed:
        if isinstance(route, APIRoute):
            yield route.path, set(route.methods or ())
        elif hasattr(route, "effective_route_contexts"):  # what FastAPI keeps of an included router
            yield from ((one.path, set(one.methods)) for one in route.effective_route_contexts())


def test_every_route_by_every_role(served: tuple[Service, httpx.Client]) -> None:
    """A caller without the role is refused before anything is looked at; one with it gets any other answer."""
    service, client = served
    asked = routes(service)
    assert len(asked) > 60
    for method, path in asked:
        if "stream" in path or path.endswith("/events") or path in ("/healthz", "/openapi.json", "/doctor"):
            continue
        needed = needed_role(method, path)
        for role in Role:
            if role.reaches(needed) and method != "GET":
                continue  # it would be done
            with client.stream(method, path, headers=basic(str(role))) as answer:
                assert (answer.status_code == 403) is not role.reaches(needed), f"{role} {method} {path}: {answer.status_code}"


@pytest.mark.parametrize("ending", ["%0A", "%0D", "%00", "%7F"])
def test_no_route_answers_at_a_path_that_no_rule_has(ending: str, served: tuple[Service, httpx.Client]) -> None:
    """A route's pattern ends with `$`, which matches before a newline, too; the rules match whole paths."""
    service, client = served
    for method, path in routes(service):
        answer = client.request(method, f"{path}{ending}", headers=basic("viewer"))
        assert answer.status_code == 404, f"{method} {path}: {answer.status_code}"
        assert needed_role(method, path + unquote(ending)) is Role.ADMIN
    token = client.post(f"{API}/tokens{ending}", headers=basic("operator"), json={"name": "a", "role": "admin"})
    assert token.status_code == 404


def test_every_get_is_a_head_too(served: tuple[Service, httpx.Client]) -> None:
    """RFC 9110, section 9.3.2: the same status and fields, and no content."""
    service, client = served
    asked = [path for method, path in routes(service) if method == "GET"]
    assert len(asked) > 40
    varies = {"date", "content-length", "set-cookie", "etag", "last-modified"}
    for path in asked:
        if path.endswith(("/stream", "/events")):
            continue  # it has no end
        got, reported = (client.request(method, path, headers=basic("admin")) for method in ("GET", "HEAD"))
        assert reported.content == b"", path
        assert reported.status_code == got.status_code, f"{path}: HEAD {reported.status_code}, GET {got.status_code}"
        assert reported.headers.keys() - varies == got.headers.keys() - varies, path
        assert reported.headers.get("content-type") == got.headers.get("content-type"), path


def test_the_document_says_the_role_of_each_operation(served: tuple[Service, httpx.Client]) -> None:
    for path, operations in served[0].app.openapi()["paths"].items():
        for method, operation in operations.items():
            if path.startswith(API) and "/peer/" not in path:
                assert operation["x-required-role"] == needed_role(method.upper(), path.replace("{", "").replace("}", ""))


def test_a_refused_login_is_counted(served: tuple[Service, httpx.Client]) -> None:
    def refused() -> float:
        text = served[1].get("/metrics", headers=basic("viewer")).text
        return float(next(line.split()[1] for line in text.splitlines() if line.startswith("synvirt_logins_refused_total ")))

    before = refused()
    headers = {"Authorization": "Basic " + base64.b64encode(b"viewer:wrong").decode()}
    assert served[1].get(f"{PREFIX}/migrations", headers=headers).status_code == 401
    assert refused() == before + 1


@pytest.mark.parametrize(
    ("method", "path", "needed"),
    [
        ("GET", f"{API}/migrator/migrations", Role.VIEWER),
        ("POST", f"{API}/migrator/migrations", Role.OPERATOR),
        ("POST", f"{API}/migrator/migrations/{ID}/cancel", Role.OPERATOR),
        ("DELETE", f"{API}/migrator/migrations/{ID}", Role.ADMIN),
        ("GET", f"{API}/migrator/sources", Role.VIEWER),
        ("GET", f"{API}/migrator/sources/{ID}/vms", Role.OPERATOR),
        ("POST", f"{API}/migrator/sources", Role.ADMIN),
        ("PATCH", f"{API}/migrator/sources/{ID}", Role.ADMIN),
        ("POST", f"{API}/migrator/sources/{ID}/test", Role.OPERATOR),
        ("POST", f"{API}/migrator/keyring/rotate", Role.ADMIN),
        ("POST", f"{API}/migrator/host-files/inspect", Role.OPERATOR),
        ("POST", f"{API}/backup/jobs/{ID}/run", Role.OPERATOR),
        ("POST", f"{API}/backup/restore-points/{ID}/restore", Role.OPERATOR),
        ("DELETE", f"{API}/backup/restore-points/{ID}", Role.ADMIN),
        ("PATCH", f"{API}/backup/restore-points/{ID}", Role.ADMIN),
        ("GET", f"{API}/backup/repositories/{ID}/recovery-key", Role.ADMIN),
        ("POST", f"{API}/backup/repositories", Role.ADMIN),
        ("GET", f"{API}/audit", Role.ADMIN),
        ("GET", f"{API}/tokens", Role.ADMIN),
        ("POST", "/sources/new/vim_api", Role.ADMIN),
        ("POST", f"/backups/repositories/{ID}/key", Role.ADMIN),
        ("POST", f"/backups/points/{ID}/let-go", Role.ADMIN),
        ("POST", f"/migrations/{ID}/destroy", Role.ADMIN),
        ("POST", f"/migrations/{ID}/fence", Role.ADMIN),
        ("POST", f"/migrations/{ID}/take-over", Role.OPERATOR),
        ("POST", f"/waves/{ID}/remove", Role.ADMIN),
        ("POST", f"/waves/{ID}/roll-back", Role.OPERATOR),
        ("GET", f"/waves/{ID}", Role.VIEWER),
        ("GET", "/new/machine", Role.OPERATOR),
        ("POST", "/new/submit", Role.OPERATOR),
        ("GET", "/", Role.VIEWER),
        ("GET", "/metrics", Role.VIEWER),
        ("POST", "/a/route/of/tomorrow", Role.OPERATOR),
        ("DELETE", "/a/route/of/tomorrow", Role.ADMIN),
    ],
)
def test_what_a_role_is_for(method: str, path: str, needed: Role) -> None:
    assert needed_role(method, path) is needed


def test_a_refusal_names_the_role(served: tuple[Service, httpx.Client]) -> None:
    answer = served[1].post(f"{PREFIX}/sources", headers=basic("operator"), json={})
    assert (answer.status_code, answer.json()["code"]) == (403, "E_MIG_FORBIDDEN")
    assert "the role admin, and operator has the role operator" in answer.json()["detail"]


def test_a_refusal_of_the_backups_has_their_code(served: tuple[Service, httpx.Client]) -> None:
    answer = served[1].post(f"{API}/backup/repositories", headers=basic("operator"), json={})
    assert (answer.status_code, answer.json()["code"]) == (403, "E_BAK_FORBIDDEN")
    foreign = basic("admin") | {"Sec-Fetch-Site": "cross-site"}
    answer = served[1].post(f"{API}/backup/repositories", headers=foreign, json={})
    assert (answer.status_code, answer.json()["code"]) == (403, "E_BAK_FORBIDDEN")


# ── tokens ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def made(client: httpx.Client, role: str, **more: object) -> dict[str, str]:
    answer = client.post(f"{API}/tokens", headers=basic("admin"), json={"name": f"for-{role}", "role": role, **more})
    assert answer.status_code == 201, answer.text
    return dict(answer.json())


def test_a_token_still_opens_where_its_use_cannot_be_noted(
    served: tuple[Service, httpx.Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk locked out every script with a token, also those that only read."""
    service, client = served
    token = made(client, "viewer")

    def full() -> None:
        raise PersistFailed("the store failed: database or disk is full")

    monkeypatch.setattr(service.store.tokens, "_writing", full)
    answer = client.get(f"{PREFIX}/migrations", headers={"Authorization": f"Bearer {token['secret']}"})
    assert answer.status_code == 200, answer.text


def test_a_token_opens_what_its_role_may(served: tuple[Service, httpx.Client]) -> None:
    service, client = served
    token = made(client, "viewer")
    bearer = {"Authorization": f"Bearer {token['secret']}"}
    assert client.get(f"{PREFIX}/migrations", headers=bearer).status_code == 200
    assert client.post(f"{PREFIX}/migrations", headers=bearer, json={}).status_code == 403
    [listed] = [one for one in client.get(f"{API}/tokens", headers=basic("admin")).json()["items"] if one["id"] == token["id"]]
    assert (listed["last_used_at"] is not None, "secret" in listed, listed["account"]) == (True, False, "admin")
    kept = Path(service.settings.data_dir, "migrator.db").read_bytes()
    assert token["secret"].encode() not in kept
    assert client.delete(f"{API}/tokens/{token['id']}", headers=basic("admin")).status_code == 204
    assert client.get(f"{PREFIX}/migrations", headers=bearer).status_code == 401


@pytest.mark.parametrize("secret", ["x", "svt_", "svt_guess", "x" * 4000, "svt_\u00e9"])
def test_what_is_no_token_opens_nothing(served: tuple[Service, httpx.Client], secret: str) -> None:
    answer = served[1].get(f"{PREFIX}/migrations", headers=httpx.Headers([(b"authorization", f"Bearer {secret}".encode())]))
    assert answer.status_code == 401


def test_a_token_expires(served: tuple[Service, httpx.Client]) -> None:
    token = made(served[1], "admin", expires_days=1e-9)
    bearer = {"Authorization": f"Bearer {token['secret']}"}
    assert served[1].get(f"{PREFIX}/migrations", headers=bearer).status_code == 401


# ── the audit trail ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_who_did_what_is_kept_and_a_changed_or_missing_entry_shows(served: tuple[Service, httpx.Client]) -> None:
    service, client = served
    for account in ("admin", "operator"):  # a first request has an entry of its own
        client.get(f"{PREFIX}/migrations", headers=basic(account))
    for name in ("one", "two", "three"):
        assert made(client, "viewer", name=name)
    client.post(f"{PREFIX}/migrations/{ID}/cancel", headers=basic("operator"))
    [newest, *older] = client.get(f"{API}/audit", headers=basic("admin")).json()["items"]
    assert (newest["account"], newest["role"], newest["method"], newest["result"]) == ("operator", "operator", "POST", 404)
    assert (newest["resource"], newest["address"]) == (f"{PREFIX}/migrations/{ID}/cancel", "127.0.0.1")
    assert newest["prev_digest"] == older[0]["digest"]
    assert older[0]["detail"].startswith(f"{API}/tokens/"), "what was made is named"
    assert {one["resource"].rpartition("/")[2] for one in older if one["method"] in {"GET", "HEAD"}} <= {"recovery-key", "key"}

    def broken() -> int | None:
        found = client.get(f"{API}/audit/verify", headers=basic("admin")).json()["broken_at"]
        return None if found is None else int(found)

    assert broken() is None
    with service.store._engine.begin() as db:
        kept = db.execute(audit.select().where(audit.c.seq == newest["seq"] - 1)).one()
        db.execute(delete(audit).where(audit.c.seq == kept.seq))
    assert broken() == newest["seq"], "one was removed before it"
    with service.store._engine.begin() as db:
        db.execute(audit.insert().values(seq=kept.seq, digest=kept.digest, document=kept.document.replace("admin", "nadim")))
    assert broken() == kept.seq
    with service.store._engine.begin() as db:
        db.execute(update(audit).where(audit.c.seq == kept.seq).values(document=kept.document))
    assert broken() is None


def test_a_job_and_its_entry_say_who_submitted_it_and_which_plan(served: tuple[Service, httpx.Client]) -> None:
    service, client = served
    for account in ("admin", "operator"):  # a first request has an entry of its own
        client.get(f"{PREFIX}/migrations", headers=basic(account))
    answer = client.post(
        f"{PREFIX}/migrations", headers=basic("operator"), json={"plan": PLAN.model_dump(mode="json", exclude_none=True)}
    )
    assert answer.status_code == 201, answer.text
    job = answer.json()
    who = Submitter(account="operator", role="operator", address="127.0.0.1")
    assert (job["submitted_by"], service.store.get(UUID(job["id"])).submitted_by) == (who.model_dump(), who)
    newest = client.get(f"{API}/audit?limit=1", headers=basic("admin")).json()["items"][0]
    assert {name: newest[name] for name in job["submitted_by"]} == job["submitted_by"], "as the trail names it"
    canonical = json.dumps(job["plan"], sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert newest["detail"] == f"{PREFIX}/migrations/{job['id']}"
    assert newest["plan_digest"] == hashlib.sha256(canonical.encode()).hexdigest()
    refused = client.post(f"{PREFIX}/migrations", headers=basic("operator"), json={"plan": {}})
    entry = client.get(f"{API}/audit?limit=1", headers=basic("admin")).json()["items"][0]
    assert (refused.status_code, entry["result"], entry["plan_digest"]) == (400, 400, None)
    assert service.intake.submit(PLAN).submitted_by is None, "the service itself"


def test_the_trail_as_lines_for_a_collector(served: tuple[Service, httpx.Client]) -> None:
    client = served[1]
    made(client, "viewer", name="exported")
    everything = client.get(f"{API}/audit/export", headers=basic("admin"))
    assert everything.headers["Content-Type"] == "application/x-ndjson"
    entries = [json.loads(line) for line in everything.text.splitlines()]
    assert [one["seq"] for one in entries] == sorted(one["seq"] for one in entries)
    more = client.get(f"{API}/audit/export?after={entries[-2]['seq']}", headers=basic("admin"))
    assert [json.loads(line) for line in more.text.splitlines()] == [entries[-1]]


def test_old_entries_go_and_the_rest_is_verified(tmp_path: Path) -> None:
    service = Service(tmp_path)
    rows = service.store.audit
    entry = AuditEntry(at=now(), account="eve", role="admin", address="", method="POST", resource="/x", result=200)
    for days in (30, 20, 10, 5, 1):
        rows.add(entry.model_copy(update={"at": now() - timedelta(days=days)}))
    assert rows.expire(now() - timedelta(days=40)) == 0
    assert rows.expire(now() - timedelta(days=7)) == 3
    assert rows.expire(now() - timedelta(days=7)) == 0
    items, _ = rows.page(limit=10)
    assert [(one.seq, one.account, one.kept_from) for one in items] == [(6, "(service)", 4), (5, "eve", None), (4, "eve", None)]
    assert broken_at(rows.links(a_piece=2)) is None
    assert broken_at(iter([*rows.links()][:2])) == 5, "the oldest went, and nobody said so"
    with expiring(rows, 1e-9):  # the service's own thread; the newest stays
        deadline = time.monotonic() + 60
        while len(items) > 2 and time.monotonic() < deadline:
            items, _ = rows.page(limit=10)
    assert [one.kept_from for one in items] == [6, 4]
    assert broken_at(rows.links()) is None
    service.close()


def test_old_entries_that_go_while_the_trail_is_verified_are_no_break(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry that says so is newer than where the reading began, and the old ones are gone before it comes to them."""
    service = Service(tmp_path)
    rows = service.store.audit
    entry = AuditEntry(at=now(), account="eve", role="admin", address="", method="POST", resource="/x", result=200)
    for days in (30, 20, 10, 5, 1):
        rows.add(entry.model_copy(update={"at": now() - timedelta(days=days)}))
    links = rows.links
    gone: list[int] = []

    def removed_meanwhile(*, a_piece: int) -> Iterator[Link]:
        for link in links(a_piece=2):
            yield link
            if not gone:
                gone.append(rows.expire(now() - timedelta(days=7)))

    monkeypatch.setattr(rows, "links", removed_meanwhile)
    assert (verified(rows), gone) == (AuditVerified(entries=3, broken_at=None), [3])
    with service.store._engine.begin() as db:
        db.execute(delete(audit).where(audit.c.seq == 4))
    assert verified(rows).broken_at == 5, "what nobody noted is still found"
    service.close()


def test_an_entry_of_an_earlier_version_still_holds() -> None:
    """Its digest is of the fields that there were."""
    old = AuditEntry(seq=1, at=now(), account="eve", role="admin", address="", method="POST", resource="/x", result=200)
    content = json.loads(old.model_dump_json(exclude={"digest", "plan_digest", "kept_from"}))
    digest = hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    assert broken_at(iter([link_of(1, json.dumps(content | {"digest": digest}))])) is None


def test_an_entry_of_a_later_version_still_holds(served: tuple[Service, httpx.Client]) -> None:
    """After a roll-back of one version: it is listed without the field that is not known here, and its digest covers that."""
    service, client = served
    made(client, "viewer", name="one")
    with service.store._engine.begin() as db:
        last = db.execute(audit.select().order_by(audit.c.seq.desc())).first()
        assert last is not None
        content = json.loads(last.document) | {"of_later": {"signed": True}}
        kept = {name: value for name, value in content.items() if name != "digest" and value is not None}
        digest = hashlib.sha256(json.dumps(kept, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
        later = json.dumps(content | {"digest": digest})
        db.execute(update(audit).where(audit.c.seq == last.seq).values(document=later, digest=digest))
    made(client, "viewer", name="two")
    assert client.get(f"{API}/audit/verify", headers=basic("admin")).json() == {"entries": last.seq + 1, "broken_at": None}
    listed = client.get(f"{API}/audit", headers=basic("admin")).json()["items"]
    assert [one["seq"] for one in listed][:2] == [last.seq + 1, last.seq]


@pytest.mark.parametrize("damaged", ["{", "[]", "{}", "null", "7", '{"seq": 1}', '{"digest": 7, "prev_digest": []}'])
def test_an_entry_that_cannot_be_read_is_named_and_hides_no_other(served: tuple[Service, httpx.Client], damaged: str) -> None:
    service, client = served
    for name in ("one", "two", "three"):
        made(client, "viewer", name=name)
    [newest, middle, *_] = client.get(f"{API}/audit", headers=basic("admin")).json()["items"]
    with service.store._engine.begin() as db:
        db.execute(update(audit).where(audit.c.seq == middle["seq"]).values(document=damaged))
    items = client.get(f"{API}/audit", headers=basic("admin")).json()["items"]
    assert items[0] == newest
    assert (items[1]["seq"], items[1]["method"], "AuditEntry" in items[1]["detail"]) == (middle["seq"], "UNREADABLE", True)
    assert client.get(f"{API}/audit/verify", headers=basic("admin")).json()["broken_at"] == middle["seq"]
    assert service.store.audit.expire(now() - timedelta(days=7)) == 0


# ── guessing, other pages, what an answer says ───────────────────────────────────────────────────────────────────────


def test_an_ipv6_caller_is_its_64_and_an_account_is_watched_too() -> None:
    assert network_of("2001:db8:1:2:3::4") == network_of("2001:db8:1:2:ffff::1") != network_of("2001:db8:1:3::1")
    assert network_of("::ffff:192.0.2.1") == "192.0.2.1"

    def wrong(user: str, password: str, address: str) -> None:
        raise Unauthorized

    check = Throttled(wrong, clock=lambda: 0.0)
    for number in range(30):
        with pytest.raises(Unauthorized):
            check("admin", "guess", f"192.0.2.{number}")
    with pytest.raises(Unauthorized, match="for this account"):
        check("Admin", "guess", "192.0.2.99")


@pytest.mark.parametrize("path", [f"{PREFIX}/sources/{ID}/vms", "/new/machine?url=http://192.0.2.1/a.ova"])
def test_another_sites_page_makes_us_connect_nowhere(served: tuple[Service, httpx.Client], path: str) -> None:
    headers = basic("admin") | {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    assert served[1].get(path, headers=headers).status_code == 403


def test_no_answer_is_kept_by_others(served: tuple[Service, httpx.Client]) -> None:
    answer = served[1].get(f"{PREFIX}/migrations", headers=basic("viewer"))
    assert (answer.headers["Cache-Control"], answer.headers["X-Content-Type-Options"]) == ("no-store", "nosniff")


def test_an_account_without_a_group_is_nobody() -> None:
    from synvirt.api.callers.auth import role_by_group
    from synvirt.errors import Forbidden

    assert role_by_group({Role.ADMIN: "nogroup-of-this-name", Role.VIEWER: "root"}, "root") is Role.VIEWER
    with pytest.raises(Forbidden, match="none of the groups"):
        role_by_group({Role.ADMIN: "root"}, "nobody")
    assert Remembering(lambda *_: None).role_of("x") is Role.ADMIN


# ── what reading makes the service do ────────────────────────────────────────────────────────────────────────────────


def test_the_gets_that_connect_elsewhere_are_those_that_are_named(
    served: tuple[Service, httpx.Client], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whatever connects asks the guard first: here it is asked in vain."""
    service, client = served
    secrets = {"user": SecretStr("root"), "password": SecretStr("x")}
    source = service.sources.add(
        SourceRequest(name="away", kind=LiveKind.VIM_API, endpoint="https://vcenter.invalid", credentials=secrets)
    )
    ref = {"kind": "live_vm", "source_id": source.id, "vm_id": "vm-1"}
    job = service.submit(MigrationPlan.model_validate({"source": {"Live": "vim_api"}, "source_ref": ref, "mode": "Cold"}))
    service.move(job.id, State.FAILED)
    with monkeypatch.context() as patched:
        (tmp_path / "peer").mkdir()
        patched.setattr(repositories, "_folder", lambda *_, **__: HostFolder(tmp_path / "peer"))
        peer = {
            "url": "https://peer.invalid/api/v1/backup/peer/x",
            "credentials": {"username": "x", "password": "y"},
            "fingerprint_sha256": ":".join(["00"] * 32),
        }
        request = {"name": "far", "kind": "peer", "peer": peer}
        repository = service.backups.add_repository(BackupRepositoryRequest.model_validate(request))
    service.backups.repositories._open.clear()  # as after a start
    asks: list[str] = []

    def judged(self: object, host: str, port: int) -> list[str]:
        asks.append(host)
        raise socket.gaierror(socket.EAI_NONAME, "asked in vain")

    monkeypatch.setattr(outgoing.Guard, "_judged", judged)
    ids = {"source_id": source.id, "migration_id": job.id, "job_id": job.id, "repository_id": repository.id, "kind": "vim_api"}
    connecting = set()
    for path, methods in _all(service.app.routes):
        if "GET" not in methods or "stream" in path or path.endswith("/events"):
            continue
        plain = re.sub(r"\{(\w+)(:\w+)?\}", lambda found: str(ids.get(found[1], ID)), path)
        query = {**{key: str(value) for key, value in ref.items()}} if plain.startswith("/new/") else {}
        asks.clear()
        client.get(plain, params=query, headers=basic("admin"))
        if asks:
            connecting.add(plain)
    assert {path.split("/")[1] for path in connecting} == {"api", "new", "backups"}
    assert {path for path in connecting if not connects_out(path)} == set()
    for path in connecting:
        answer = client.get(path, headers=basic("admin") | {"Sec-Fetch-Site": "cross-site"})
        assert answer.status_code == 403, path
