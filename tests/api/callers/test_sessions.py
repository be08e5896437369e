"""The page's log-in: a session's cookie, what it opens, and what ends it."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest

from synvirt.accounts import FileAccounts, Role, set_password
from synvirt.api.callers import auth, sessions
from synvirt.api.callers.auth import Throttled, authenticator
from synvirt.api.callers.sessions import AGE_S, COOKIE, IDLE_S, SESSIONS_MAX, Login, Sessions
from synvirt.settings import Settings
from tests.fakes.service import PREFIX, Service, every_role

BROWSER = {"Sec-Fetch-Site": "none", "Sec-Fetch-Mode": "navigate"}
OURS = {"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "cors"}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """One account a role, named after it, in clear on loopback: this client keeps no cookie, tests send it."""
    folder = tmp_path_factory.mktemp("service")
    accounts = every_role(folder / "users", " pw ")
    offer = {"path": folder / "offered", "user": "peer"}
    set_password(folder / "users", "peer", " pw ", Role.VIEWER)
    service = Service(
        folder,
        check_password=Throttled(accounts),
        role_of=accounts.role_of,
        tls=False,
        base_url="/kvm",
        backup_offers={"other": offer},
    )
    with service.served() as server, httpx.Client(base_url=server.address, timeout=60) as client:
        yield client
    service.close()


def log_in(client: httpx.Client, user: str, password: str = " pw ", **fields: str) -> httpx.Response:
    answer = client.post("/kvm/login", data={"user": user, "password": password} | fields, headers=OURS)
    client.cookies.clear()
    return answer


def cookie_of(answer: httpx.Response) -> dict[str, str]:
    assert answer.status_code == 303, answer.text
    return {"Cookie": answer.headers["Set-Cookie"].partition(";")[0]}


API = "/kvm" + PREFIX


def test_the_cookie_is_for_this_host_alone_and_no_script(client: httpx.Client) -> None:
    answer = log_in(client, "viewer")
    name_and_value, *attributes = [part.strip() for part in answer.headers["Set-Cookie"].split(";")]
    assert name_and_value.startswith(f"{COOKIE}=")
    assert {part.lower() for part in attributes} == {"httponly", "secure", "samesite=strict", "path=/"}
    assert answer.headers["Location"] == "/kvm/"


def test_a_session_opens_what_its_account_may_until_it_is_ended(client: httpx.Client) -> None:
    cookie = cookie_of(log_in(client, "viewer"))
    page = client.get("/kvm/", headers=cookie)
    assert (page.status_code, "Log out" in page.text, ">Audit<" in page.text) == (200, True, False)
    assert client.get(f"{API}/migrations", headers=cookie | OURS).status_code == 200
    assert client.post(f"{API}/migrations", headers=cookie | OURS, json={}).status_code == 403
    assert ">Audit<" in client.get("/kvm/", headers=cookie_of(log_in(client, "admin"))).text
    assert client.post("/kvm/logout", headers=cookie | {"Sec-Fetch-Site": "same-site"}).status_code == 403
    ended = client.post("/kvm/logout", headers=cookie | OURS)
    assert (ended.status_code, ended.headers["Location"]) == (303, "/kvm/login")
    assert "Max-Age=0" in ended.headers["Set-Cookie"]
    assert client.get(f"{API}/migrations", headers=cookie).status_code == 401


def test_a_stranger_with_a_browser_is_led_to_the_log_in_and_back(client: httpx.Client) -> None:
    path = "/kvm/sources?cursor=1"
    led = client.get(path, headers=BROWSER)
    assert led.status_code == 303
    page = client.get(led.headers["Location"], headers=BROWSER)
    assert (page.status_code, 'value="/kvm/sources?cursor=1"' in page.text, "<nav" in page.text) == (200, True, True)
    assert "Log out" not in page.text
    assert ">Sources<" not in page.text
    [following] = parse_qs(urlsplit(led.headers["Location"]).query)["next"]
    assert log_in(client, "viewer", next=following).headers["Location"] == path
    assert "WWW-Authenticate" in client.get(f"{API}/migrations").headers, "the API's callers have Basic"


def test_what_is_sent_after_the_session_has_ended_is_answered_and_not_led_away(client: httpx.Client) -> None:
    """An answer can be loaded again, with what was typed; a redirect loses it."""
    ours = BROWSER | {"Sec-Fetch-Site": "same-origin"}
    form = client.post("/kvm/doctor", headers=ours | {"Accept": "text/html"})
    assert (form.status_code, "WWW-Authenticate" in form.headers) == (401, False)
    assert "reload this page" in form.text
    assert 'href="/kvm/login"' in form.text
    assert ">Sources<" not in form.text
    out = client.post("/kvm/logout", headers=ours | {"Accept": "text/html"})
    assert (out.status_code, out.headers["Location"]) == (303, "/kvm/login"), "nothing was typed"
    upload = client.post(f"{API}/uploads", headers=OURS)
    assert (upload.status_code, "WWW-Authenticate" in upload.headers) == (401, False)
    assert "another tab" in upload.json()["hint"], "a script of the page shows it to a person, who knows no Basic"


@pytest.mark.parametrize(
    ("shown", "following"),
    [("https://kvm1:8443/kvm/waves/1?state=ready", "/kvm/waves/1?state=ready"), ("https://[kvm1/", "/kvm/"), ("", "/kvm/")],
)
def test_a_page_that_asks_again_by_itself_is_led_to_the_log_in_and_back(
    client: httpx.Client, shown: str, following: str
) -> None:
    part = client.get("/kvm/waves/1", headers=OURS | {"HX-Request": "true", "HX-Current-URL": shown})
    assert (part.status_code, "WWW-Authenticate" in part.headers) == (401, False)
    page = urlsplit(part.headers["HX-Redirect"])
    assert page.path == "/kvm/login"
    asked = parse_qs(page.query).get("next", [""])[0]
    assert log_in(client, "viewer", next=asked).headers["Location"] == following


@pytest.mark.parametrize(
    "elsewhere", ["https://evil.example/", "//evil.example/", "/\\evil.example", "/kvm/\r\nX: y", "javascript:1", "/other/"]
)
def test_it_leads_nowhere_else(client: httpx.Client, elsewhere: str) -> None:
    assert log_in(client, "viewer", next=elsewhere).headers["Location"] == "/kvm/"


def test_who_is_not_let_in(client: httpx.Client) -> None:
    for user, password in (("viewer", "pw"), ("nobody", " pw "), ("", ""), ("viewer\0", " pw "), ("v" * 5000, " pw ")):
        answer = log_in(client, user, password)
        assert (answer.status_code, "Set-Cookie" in answer.headers, "WWW-Authenticate" in answer.headers) == (401, False, False)
        assert "the user or the password is wrong" in answer.text
    assert log_in(client, "peer").status_code == 403, "another service's account has no page"
    foreign = client.post("/kvm/login", data={"user": "viewer", "password": " pw "}, headers={"Sec-Fetch-Site": "cross-site"})
    assert (foreign.status_code, "Set-Cookie" in foreign.headers) == (403, False)
    for made_up in ("", "x", "\u00e9" * 40, '"; Path=/'):
        headers = httpx.Headers([(b"cookie", f"{COOKIE}={made_up}".encode())])
        assert client.get(f"{API}/migrations", headers=headers).status_code == 401


def test_what_ends_a_session() -> None:
    at, version = 0.0, 1

    known = Sessions(lambda: version, clock=lambda: at)
    secret = known.begin("eve")
    for _ in range(int(AGE_S / IDLE_S) + 1):  # one that is used lives its whole age
        at += IDLE_S - 1
        alive = known.of(secret)
        assert (alive == Login("eve")) is (at < AGE_S)
    idle = known.begin("eve")
    at += IDLE_S
    assert known.of(idle) is None
    changed = known.begin("eve")
    version = 2
    assert known.of(changed) is None, "the passwords changed"
    many = [known.begin("eve") for _ in range(SESSIONS_MAX + 1)]
    other = known.begin("bob")
    assert [known.of(one) for one in many[:2]] == [None, Login("eve")]
    known.end(other)
    assert known.of(other) is None
    assert known._sessions.keys().isdisjoint(many), "no secret is kept"


def test_a_changed_password_ends_it(tmp_path: Path) -> None:
    users = tmp_path / "users"
    set_password(users, "eve", "one")
    known = Sessions(FileAccounts(users).version)
    secret = known.begin("eve")
    assert known.of(secret) == Login("eve")
    set_password(users, "eve", "two")
    assert known.of(secret) is None


def test_it_outlives_a_restart_and_one_that_was_ended_does_not(tmp_path: Path) -> None:
    kept = tmp_path / "sessions"
    before = Sessions(path=kept)
    stays, ended = before.begin("eve"), before.begin("eve")
    before.end(ended)
    assert kept.stat().st_mode & 0o777 == 0o600
    assert stays not in kept.read_text()
    after = Sessions(path=kept)
    assert (after.of(stays), after.of(ended)) == (Login("eve"), None)
    later = Sessions(path=kept, clock=lambda: time.time() + AGE_S)
    assert later.of(stays) is None, "a restart makes no session longer"
    for damaged in (b"", b"[1]", b'{"a": 1}', b'{"a": [1, 2, "x"]}'):
        kept.write_bytes(damaged)
        assert Sessions(path=kept).of(stays) is None


def test_a_slow_disk_holds_up_no_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop looks a session up for each request: it must not wait for the file of another log-in."""
    writing, release = threading.Event(), threading.Event()
    known = Sessions(path=tmp_path / "sessions")
    secret = known.begin("eve")

    def slow(path: Path, content: bytes) -> None:
        writing.set()
        assert release.wait(60)

    monkeypatch.setattr(sessions, "put_private_file", slow)
    with ThreadPoolExecutor(2) as threads:
        begun = threads.submit(known.begin, "bob")
        assert writing.wait(60)
        looked = threads.submit(known.of, secret)
        try:
            assert looked.result(10) == Login("eve")
        finally:
            release.set()
    assert known.of(begun.result()) == Login("bob")


def test_a_session_of_the_hosts_accounts_that_has_ended_is_not_brought_back_by_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package's unit hides /etc/shadow behind an empty file, until it is replaced, and again from the next start on."""
    shadow, hiding, kept = tmp_path / "shadow", tmp_path / "hiding", tmp_path / "sessions"
    shadow.write_text("eve:$y$hash:20000::::::\n")
    hiding.touch()
    settings = Settings(data_dir=tmp_path, auth="pam", pam_admin_group="root")

    def started() -> Sessions:
        monkeypatch.setattr(auth, "SHADOW", hiding)
        return Sessions(authenticator(settings, announce=print).version, path=kept)

    sessions = started()
    secret = sessions.begin("eve")
    assert sessions.of(secret) == Login("eve")
    monkeypatch.setattr(auth, "SHADOW", shadow)  # an account was locked
    assert sessions.of(secret) is None
    assert started().of(secret) is None
    # Where nothing hides it, sessions outlive a restart.
    monkeypatch.setattr(auth, "SHADOW", shadow)
    secret = Sessions(authenticator(settings, announce=print).version, path=kept).begin("eve")
    other = Sessions(authenticator(settings, announce=print).version, path=kept)
    assert other.of(secret) == Login("eve")
