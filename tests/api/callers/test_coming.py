"""Log-ins, log-outs and refused ones as entries of the audit trail; who tried what takes another role; who saw a key."""

import asyncio
import base64
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from synvirt.accounts import Role, set_password
from synvirt.api.callers.auth import Throttled
from synvirt.api.callers.coming import COUNTED_FOR_S, COUNTED_MAX, NEW_AFTER_S, Caller, Coming, counts_written, shown_account
from synvirt.api.callers.gate import CALLER
from synvirt.api.callers.sessions import COOKIE
from synvirt.api.routes.audit import Audited
from synvirt.errors import Unauthorized
from synvirt.store.access import AuditEntry
from tests.fakes.service import PREFIX, Service, every_role

OURS = {"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "cors"}
API = f"/kvm{PREFIX}"
PEER = "/kvm/api/v1/backup/peer/other"


def basic(user: str, password: str = "pw") -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()}


class Site:
    def __init__(self, service: Service, client: httpx.Client) -> None:
        self.service, self.client = service, client

    def entries(self) -> list[tuple[str, str, str, str, int]]:
        """Oldest first."""
        found, _ = self.service.store.audit.page(limit=500)
        assert all(one.address == "127.0.0.1" for one in found)
        return [(one.method, one.resource, one.account, one.role, one.result) for one in reversed(found)]

    def details(self) -> list[str]:
        found, _ = self.service.store.audit.page(limit=500)
        return [one.detail for one in reversed(found)]

    def log_in(self, user: str, password: str = "pw") -> httpx.Response:
        answer = self.client.post("/kvm/login", data={"user": user, "password": password}, headers=OURS)
        self.client.cookies.clear()
        return answer

    def refused(self) -> float:
        metrics = self.client.get("/metrics", headers=basic("admin")).text
        return float(next(line.split()[1] for line in metrics.splitlines() if line.startswith("synvirt_logins_refused_total ")))


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    (tmp_path / "offered").mkdir()
    accounts = every_role(tmp_path / "users", "pw")
    set_password(tmp_path / "users", "peer", "pw", Role.VIEWER)
    service = Service(
        tmp_path,
        check_password=Throttled(accounts),
        role_of=accounts.role_of,
        tls=False,
        base_url="/kvm",
        backup_offers={"other": {"path": tmp_path / "offered", "user": "peer"}},
    )
    with service.served() as server, httpx.Client(base_url=server.address, timeout=60) as client:
        yield Site(service, client)
    service.close()


def test_who_logs_in_on_the_page_and_leaves(site: Site) -> None:
    answer = site.log_in("operator")
    cookie = {"Cookie": answer.headers["Set-Cookie"].partition(";")[0]}
    assert cookie["Cookie"].startswith(COOKIE)
    for _ in range(3):
        assert site.client.get("/kvm/", headers=cookie).status_code == 200
    assert site.client.post("/kvm/logout", headers=cookie | OURS).status_code == 303
    assert site.client.post("/kvm/logout", headers=cookie | OURS).status_code in {303, 401}, "nobody is there to leave"
    assert site.entries() == [
        ("LOGIN", "page", "operator", "operator", 200),
        ("LOGOUT", "page", "operator", "operator", 200),
    ]


def test_basic_and_tokens_are_an_entry_of_each_caller_and_not_of_each_request(site: Site) -> None:
    for _ in range(3):
        assert site.client.get(f"{API}/migrations", headers=basic("viewer")).status_code == 200
    made = site.client.post("/kvm/api/v1/tokens", headers=basic("admin"), json={"name": "ci", "role": "viewer"}).json()
    token = {"Authorization": f"Bearer {made['secret']}"}
    for _ in range(3):
        assert site.client.get(f"{API}/migrations", headers=token).status_code == 200
    site.client.delete(f"/kvm/api/v1/tokens/{made['id']}", headers=basic("admin"))
    assert site.client.get(f"{API}/migrations", headers=token).status_code == 401
    assert site.entries() == [
        ("LOGIN", "basic", "viewer", "viewer", 200),
        ("LOGIN", "basic", "admin", "admin", 200),
        ("POST", "/kvm/api/v1/tokens", "admin", "admin", 201),
        ("LOGIN", "token", "token:ci", "viewer", 200),
        ("DELETE", f"/kvm/api/v1/tokens/{made['id']}", "admin", "admin", 204),
        ("LOGIN", "token", "", "", 401),
    ]
    assert made["secret"] not in str(site.details())


def test_who_is_refused_is_an_entry_each_account_a_metric_and_a_count(site: Site) -> None:
    before = site.refused()
    known = len(site.entries())
    for _ in range(3):
        assert site.log_in("admin", "guess").status_code == 401
    assert site.log_in("peer").status_code == 403, "another service's account has no page"
    assert site.client.get(f"{API}/migrations", headers=basic("eve\x1b[2J")).status_code == 401
    assert site.client.get(f"{API}/migrations", headers=basic("peer")).status_code == 401, "not beneath its offer"
    assert site.client.get(f"{API}/migrations").status_code == 401, "who says nothing tries nothing"
    site.service.app.state.coming.write_counts(at_end=True)
    assert site.entries()[known:] == [
        ("LOGIN", "page", "admin", "", 401),
        ("LOGIN", "page", "peer", "", 403),
        ("LOGIN", "basic", "eve\N{REPLACEMENT CHARACTER}[2J", "", 401),
        ("LOGIN", "basic", "peer", "", 401),
        ("LOGIN", "page", "admin", "", 401),
    ]
    assert site.details()[-1].startswith("2 more like the one before; the last: the user or the password is wrong")
    assert "guess" not in str(site.details())
    assert site.refused() == before + 6


def test_a_peer_is_an_entry_when_it_comes_and_no_more(site: Site) -> None:
    for _ in range(3):
        assert site.client.get(PEER, headers=basic("peer")).status_code == 200
    assert site.entries() == [("LOGIN", "basic", "peer", "viewer", 200)]


def test_who_tried_what_takes_another_role(site: Site) -> None:
    job = UUID(int=1)
    assert site.client.delete(f"{API}/migrations/{job}", headers=basic("operator")).status_code == 403
    assert site.client.get("/kvm/api/v1/audit", headers=basic("operator")).status_code == 403, "looking changes nothing"
    assert site.entries()[1:] == [("DELETE", f"{API}/migrations/{job}", "operator", "operator", 403)]
    assert "this needs the role admin" in site.details()[-1]


def test_another_sites_page_that_acts_by_a_known_browser(site: Site) -> None:
    foreign = {"Sec-Fetch-Site": "cross-site"} | basic("operator")
    assert site.client.post(f"{API}/migrations", headers=foreign, json={}).status_code == 403
    assert site.entries()[1:] == [("POST", f"{API}/migrations", "operator", "operator", 403)]


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/api/v1/backup/repositories/{}/recovery-key"), ("POST", "/backups/repositories/{}/key")],
)
def test_who_looked_at_a_key(site: Site, method: str, path: str) -> None:
    shown = "/kvm" + path.format(UUID(int=1))
    site.client.request(method, shown, headers=basic("admin") | OURS)
    assert site.entries()[-1] == (method, shown, "admin", "admin", 404)


def test_the_chain_holds_with_them(site: Site) -> None:
    site.log_in("admin")
    site.log_in("admin", "guess")
    answer = site.client.get("/kvm/api/v1/audit/verify", headers=basic("admin"))
    assert answer.json() == {"entries": 3, "broken_at": None}


# ── what strangers can make of it ────────────────────────────────────────────────────────────────────────────────────


class Trail:
    def __init__(self) -> None:
        self.entries: list[AuditEntry] = []
        self.at = 0.0
        self.coming = Coming(self.entries.append, clock=lambda: self.at)

    def guess(self, account: str, address: str = "192.0.2.1") -> None:
        self.coming.refuse(account, address, "page", Unauthorized("the user or the password is wrong"))


def test_a_million_guesses_fill_no_disk_and_are_counted() -> None:
    trail = Trail()
    for number in range(20_000):
        trail.guess(f"user{number}", f"2001:db8:{number % 5000:x}::1")
    assert len(trail.entries) == COUNTED_MAX + 1
    for _ in range(1000):
        trail.guess("user0", "2001:db8::2")  # of the same /64
    assert len(trail.entries) == COUNTED_MAX + 1
    trail.at += COUNTED_FOR_S
    trail.coming.write_counts()
    others, first = trail.entries[-1], trail.entries[COUNTED_MAX + 1]
    assert (first.account, first.detail[:9]) == ("user0", "1000 more")
    assert (others.account, others.detail[:10]) == ("(others)", f"{20_000 - COUNTED_MAX - 1} more")
    assert trail.coming.refused == 21_000
    told_by_now = len(trail.entries)
    trail.coming.write_counts(at_end=True)
    assert len(trail.entries) == told_by_now, "once"
    trail.guess("user0")
    assert len(trail.entries) == told_by_now + 1, "after that it is an entry again"


def test_what_is_counted_is_reported_at_the_services_end() -> None:
    trail = Trail()
    with counts_written(trail.coming):
        for _ in range(3):
            trail.guess("admin")
    assert [entry.detail[:6] for entry in trail.entries] == ["the us", "2 more"]


def test_who_comes_by_each_request_is_new_after_half_a_day_and_elsewhere() -> None:
    trail = Trail()
    new = trail.coming.is_new
    assert (new("eve", "192.0.2.1", "basic"), new("eve", "192.0.2.1", "basic")) == (True, False)
    assert (new("eve", "192.0.2.2", "basic"), new("eve", "192.0.2.1", "token"), new("bob", "192.0.2.1", "basic")) == (True,) * 3
    trail.at += NEW_AFTER_S
    assert new("eve", "192.0.2.1", "basic")
    for number in range(10_000):
        new(f"user{number}", "192.0.2.1", "basic")
    assert len(trail.coming._known) <= 4096


def test_a_name_of_any_length_is_cut() -> None:
    trail = Trail()
    trail.guess("x" * 5000)
    trail.coming.came(Caller("y" * 5000, Role.ADMIN), "page")
    assert [len(entry.account) for entry in trail.entries] == [100, 100]


def test_what_is_done_is_an_entry_of_the_same_words_as_who_came() -> None:
    """A provider may name an account anything, and a path hold anything."""
    trail, caller = Trail(), Caller("oidc:eve\x1b[2J\n" + "z" * 200, Role.ADMIN, "192.0.2.1")

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 201, "headers": [(b"location", b"/a\x1bb")]})

    async def nothing(message: Message) -> None:
        pass

    async def silence() -> Message:
        return {"type": "http.disconnect"}

    scope = {"type": "http", "method": "POST", "path": "/x\r\ny", CALLER: caller}
    asyncio.run(Audited(answer, write=trail.entries.append)(scope, silence, nothing))
    trail.coming.came(caller, "oidc")
    done, came = trail.entries
    assert done.account == came.account == shown_account(caller)
    assert (done.resource, done.detail, done.result) == ("/x\ufffd\ufffdy", "/a\ufffdb", 201)
    assert done.account.startswith("oidc:eve\ufffd[2J\ufffdz")
    assert len(done.account) == 100
