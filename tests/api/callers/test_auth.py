"""Who may call: the users file, the host's accounts, and the door before every path but two."""

import base64
import errno
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from synvirt import accounts
from synvirt.api.callers import auth
from synvirt.api.callers.auth import Remembering, Throttled, authenticator, pam_accounts
from synvirt.api.callers.sessions import Sessions
from synvirt.errors import BadRequest, Internal, Unauthorized
from synvirt.privileged.here import Here
from synvirt.settings import Settings
from synvirt.settings.data_dir import prepare_data_dir
from tests.fakes.service import PASSWORD, PREFIX, USER, Service
from tests.needs import need, need_root


def basic(user: str, password: str) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()}


# ── the door ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """The TCP side, in clear on loopback."""
    service = Service(tmp_path_factory.mktemp("service"), tls=False)
    with service.served() as server, httpx.Client(base_url=server.address, timeout=60) as client:
        yield client
    service.close()


@pytest.mark.parametrize("path", [f"{PREFIX}/migrations", f"{PREFIX}/migrations/stream", f"{PREFIX}/nothing", "/", "/metrics"])
@pytest.mark.parametrize(
    "headers",
    [
        {},
        basic(USER, "wrong"),
        basic("nobody", PASSWORD),
        basic("", ""),
        {"Authorization": "Bearer x"},
        {"Authorization": "Basic"},
        {"Authorization": "Basic !!!"},
        {"Authorization": "Basic " + base64.b64encode(b"no colon").decode()},
        {"Authorization": "Basic " + base64.b64encode(b"\xff\xfe:\xff").decode()},
        {"Authorization": "Basic " + base64.b64encode(b"admin:a\0b").decode()},
        {"Authorization": "Basic " + "A" * 5000},
        {"X-Forwarded-For": "127.0.0.1", "X-Synvirt-Local": "true", "synvirt.local": "true"},
    ],
    ids=lambda headers: str(headers)[:50],
)
def test_the_door_is_shut(door: httpx.Client, path: str, headers: dict[str, str]) -> None:
    response = door.get(path, headers=headers)
    assert (response.status_code, response.json()["code"]) == (401, "E_MIG_UNAUTHENTICATED")
    assert response.headers["WWW-Authenticate"] == 'Basic realm="SynVirt", charset="UTF-8"'
    assert response.headers["Content-Type"] == "application/problem+json"


@pytest.mark.parametrize("path", ["/api/v1/backup/jobs", "/api/v1/backup/nothing", "/api/v1/backup"])
def test_the_backups_have_a_code_of_their_own(door: httpx.Client, path: str) -> None:
    response = door.get(path, headers=basic(USER, "wrong"))
    assert (response.status_code, response.json()["code"]) == (401, "E_BAK_UNAUTHENTICATED")
    assert response.headers["WWW-Authenticate"] == 'Basic realm="SynVirt", charset="UTF-8"'


def test_it_is_shut_before_the_body_is_read(door: httpx.Client) -> None:
    assert door.post(f"{PREFIX}/migrations", content=b"nonsense").status_code == 401


@pytest.mark.parametrize("path", ["/healthz", "/openapi.json"])
def test_two_paths_are_open(door: httpx.Client, path: str) -> None:
    assert door.get(path).status_code == 200


@pytest.mark.parametrize("path", ["/healthz", "/openapi.json"])
def test_wrong_credentials_are_wrong_there_too(door: httpx.Client, path: str) -> None:
    assert door.get(path, headers=basic(USER, "wrong")).status_code == 401


@pytest.mark.parametrize("path", ["//healthz/../api/v1/migrator/migrations", "/healthz/", "/HEALTHZ", "/openapi.json/x"])
def test_near_them_is_shut(door: httpx.Client, path: str) -> None:
    assert door.get(path).status_code == 401


@pytest.mark.parametrize("scheme", ["Basic", "basic", "BASIC"])
def test_the_right_credentials(door: httpx.Client, scheme: str) -> None:
    header = basic(USER, PASSWORD)["Authorization"].replace("Basic", scheme)
    assert door.get(f"{PREFIX}/migrations", headers={"Authorization": header}).status_code == 200


def test_the_socket_needs_none(service: Service, client: httpx.Client) -> None:
    assert client.get("/migrations").status_code == 200


# ── the users file ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_first_start_makes_admin_and_shows_the_password_once(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    prepare_data_dir(settings)
    lines: list[str] = []
    check = authenticator(settings, announce=lines.append)
    [line] = lines
    password = line.split("password ")[1].split(":")[0]
    check.check("admin", password, "")
    with pytest.raises(Unauthorized):
        check.check("admin", "guess", "")
    users = settings.keyring_dir / "users"
    assert users.stat().st_mode & 0o777 == 0o600
    assert password not in users.read_text()
    authenticator(settings, announce=lines.append).check("admin", password, "")
    assert len(lines) == 1, "the second start says nothing"


def test_a_wrong_log_in_takes_the_same_work_whatever_the_name_is(tmp_path: Path) -> None:
    """Lines that were written with another cost, by an earlier version or by hand, among ours."""
    path, ran = tmp_path / "users", list[tuple[int, ...]]()

    def noted(password: str, salt: bytes, *cost: int) -> bytes:
        ran.append(cost)
        return b"another"

    lines = {"cheap": (2, 1, 1), "dear": (1 << 14, 8, 5), "dear-too": (1 << 14, 8, 5), "wide": (2, 8, 16)}
    path.write_text("".join(f"{name}:scrypt:{n}:{r}:{p}:c2FsdA==:aGFzaA==\n" for name, (n, r, p) in lines.items()))
    file = accounts.FileAccounts(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accounts, "_scrypt", noted)
        for name in (*lines, "unknown"):
            ran.clear()
            with pytest.raises(Unauthorized):
                file(name, "guess", "")
            assert sorted(ran) == sorted(set(lines.values())), name


def test_a_first_password_that_nobody_could_see_is_made_again_at_the_next_start(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    prepare_data_dir(settings)

    def closed(_line: str) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    with pytest.raises(BrokenPipeError):
        authenticator(settings, announce=closed)
    lines: list[str] = []
    check = authenticator(settings, announce=lines.append)
    check.check("admin", lines[0].split("password ")[1].split(":")[0], "")


def test_a_start_with_a_users_file_without_an_account_says_so(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    prepare_data_dir(settings)
    (settings.keyring_dir / "users").write_text("# emptied\n")
    lines: list[str] = []
    authenticator(settings, announce=lines.append)
    [line] = lines
    assert "nobody can log in" in line
    assert "synvirt password admin" in line


# ── remembering and throttling ───────────────────────────────────────────────────────────────────────────────────────


class Asked:
    """Counts what reaches it; right is `right`."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, user: str, password: str, address: str) -> None:
        self.count += 1
        if password != "right":
            raise Unauthorized


def test_what_was_right_is_known_for_a_minute() -> None:
    inner, now = Asked(), [0.0]
    accounts = Remembering(inner, clock=lambda: now[0])
    assert not accounts.remembers("eve", "right")
    accounts.check("eve", "right", "")
    for moment, known in ((0, True), (59, True), (61, False)):
        now[0] = moment
        assert accounts.remembers("eve", "right") == known
    with pytest.raises(Unauthorized):
        accounts.check("eve", "wrong", "")
    assert not accounts.remembers("eve", "wrong"), "what was wrong is never remembered"


def test_it_forgets_all_when_the_accounts_change() -> None:
    version = [1]
    accounts = Remembering(Asked(), version=lambda: version[0])
    accounts.check("eve", "right", "")
    assert accounts.remembers("eve", "right")
    version[0] = 2
    assert not accounts.remembers("eve", "right")


def test_it_distinguishes_user_and_password_and_keeps_neither() -> None:
    accounts = Remembering(Asked())
    accounts.check("eve", "right", "")
    assert not accounts.remembers("ever", "ight")
    assert "right" not in str(accounts._right) + str(accounts._key)


def test_it_remembers_a_bounded_number() -> None:
    accounts = Remembering(Asked())
    for number in range(2 * auth.REMEMBERED_MAX):
        accounts.check(f"user{number}", "right", "")
    assert len(accounts._right) == auth.REMEMBERED_MAX


def test_strangers_who_guess_hold_up_nobody_who_is_known(tmp_path: Path) -> None:
    """A wrong password takes PAM seconds. The known caller, a token's, the socket and /healthz do not wait for those."""
    release, entered = threading.Event(), threading.Semaphore(0)

    def slow(user: str, password: str, address: str) -> None:
        if password != PASSWORD:
            entered.release()
            release.wait(100)
            raise Unauthorized

    service = Service(tmp_path, check_password=slow, tls=False)
    with service.served() as server, service.local() as local:
        url = f"{server.address}{PREFIX}/migrations"
        assert httpx.get(url, auth=httpx.BasicAuth(USER, PASSWORD), timeout=60).status_code == 200
        asked = {"name": "monitoring", "role": "viewer", "expires_days": 1}
        secret = local.post(local.base_url.copy_with(path="/api/v1/tokens"), json=asked).json()["secret"]
        with ThreadPoolExecutor(60) as strangers:
            guesses = [strangers.submit(httpx.get, url, auth=httpx.BasicAuth(USER, "guess"), timeout=110) for _ in range(60)]
            assert entered.acquire(timeout=60)
            time.sleep(0.5)
            assert httpx.get(url, auth=httpx.BasicAuth(USER, PASSWORD), timeout=60).status_code == 200
            assert httpx.get(f"{server.address}/healthz", timeout=60).status_code == 200
            assert local.get("/migrations", timeout=60).status_code == 200
            token = {"Authorization": f"Bearer {secret}"}
            assert httpx.get(url, headers=token, timeout=20).status_code == 200
            assert httpx.delete(f"{url}/1", headers=token, timeout=20).status_code == 403
            assert not any(guess.done() for guess in guesses)
            release.set()
            assert {guess.result().status_code for guess in guesses} == {401}
    service.close()


def test_an_address_that_was_wrong_too_often_must_wait_and_others_need_not() -> None:
    inner, now = Asked(), [0.0]
    check = Throttled(inner, clock=lambda: now[0])
    for _ in range(auth.FAILURES_ALLOWED):
        with pytest.raises(Unauthorized):
            check("eve", "wrong", "192.0.2.1")
    before = inner.count
    with pytest.raises(Unauthorized, match="too many") as raised:
        check("eve", "right", "192.0.2.1")
    assert "60 s" in str(raised.value.hint)
    assert inner.count == before, "it is refused unasked"
    check("eve", "right", "192.0.2.2")
    now[0] = 61
    check("eve", "right", "192.0.2.1")


def test_who_must_wait_is_told_so_and_for_how_long(tmp_path: Path) -> None:
    """Not that the password is wrong: it was not checked."""
    service = Service(tmp_path, check_password=Throttled(Asked()), tls=False, has_pages=False)
    with service.served() as server, httpx.Client(base_url=server.address, timeout=60) as client:
        for _ in range(auth.FAILURES_ALLOWED):
            assert client.get(f"{PREFIX}/migrations", headers=basic(USER, "wrong")).status_code == 401
        for path, code in ((f"{PREFIX}/migrations", "E_MIG_BAD_REQUEST"), ("/api/v1/backup/jobs", "E_BAK_BAD_REQUEST")):
            refused = client.get(path, headers=basic(USER, "right"))
            assert (refused.status_code, refused.json()["status"], refused.json()["code"]) == (429, 429, code)
            assert 0 < int(refused.headers["Retry-After"]) <= auth.FAILURES_WINDOW_S
            assert "WWW-Authenticate" not in refused.headers
    service.close()


def test_only_wrong_passwords_count() -> None:
    """PAM's helper may be away for a while: nobody guessed then."""
    away = True

    def inner(user: str, password: str, address: str) -> None:
        if away:
            raise Internal("root's helper does not answer")

    check = Throttled(inner)
    for _ in range(2 * auth.FAILURES_ALLOWED_ACCOUNT):
        with pytest.raises(Internal):
            check("eve", "right", "192.0.2.1")
    away = False
    check("eve", "right", "192.0.2.1")


def test_it_watches_a_bounded_number_of_addresses() -> None:
    check = Throttled(Asked())
    for number in range(auth.ADDRESSES_WATCHED_MAX + 10):
        with pytest.raises(Unauthorized):
            check(f"eve{number}", "wrong", f"address {number}")
    assert len(check._failures) == auth.ADDRESSES_WATCHED_MAX


def test_polling_is_not_slowed_by_scrypt(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    prepare_data_dir(settings)
    lines: list[str] = []
    check = authenticator(settings, announce=lines.append)
    password = lines[0].split("password ")[1].split(":")[0]
    check.check("admin", password, "")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accounts, "_scrypt", lambda *arguments: pytest.fail("scrypt ran again"))
        assert check.remembers("admin", password)


# ── the host's accounts ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def account() -> Iterator[tuple[str, str]]:
    """A real local account with a password, made for this test."""
    need_root("a test account of the host")
    for program in ("useradd", "chpasswd", "userdel"):
        need(program, "passwd")
    name, password = f"synvirt{os.getpid()}", "S3cret: ü"
    subprocess.run(["useradd", "--no-create-home", "--shell", "/bin/sh", name], check=True, timeout=30)
    try:
        subprocess.run(["chpasswd"], input=f"{name}:{password}\n".encode(), check=True, timeout=30)
        yield name, password
    finally:
        subprocess.run(["userdel", name], check=True, timeout=30)


def test_an_account_of_the_host(account: tuple[str, str], tmp_path: Path) -> None:
    name, password = account
    settings = Settings(data_dir=tmp_path, auth="pam", pam_operator_group=name)
    check = authenticator(settings, announce=lambda line: pytest.fail("pam has no first account"))
    check.check(name, password, "")
    assert check.role_of(name) == "operator"
    for user, wrong in ((name, "wrong"), (name, ""), ("nobody-of-that-name", password)):
        with pytest.raises(Unauthorized, match="the user or the password is wrong"):
            check.check(user, wrong, "")
    service = Service(tmp_path, check_password=check.check, tls=False)
    with service.served() as server:
        url = f"{server.address}{PREFIX}/migrations"
        assert httpx.get(url, auth=httpx.BasicAuth(name, password), timeout=60).status_code == 200
        assert httpx.get(url, auth=httpx.BasicAuth(name, "wrong"), timeout=60).status_code == 401
    service.close()


def test_a_change_of_the_hosts_passwords_ends_sessions_and_what_is_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A password that was changed, an account that was locked: both are in that file."""
    shadow = tmp_path / "shadow"
    shadow.write_text("eve:old")
    monkeypatch.setattr(auth, "SHADOW", shadow)

    class Right:
        def authenticate(self, user: str, password: str) -> bool:
            return True

    settings = Settings(data_dir=tmp_path, auth="pam", pam_operator_group="users")
    check = authenticator(settings, announce=lambda line: None, privileged=Right())
    check.check("eve", "old", "")
    sessions = Sessions(check.version)
    secret = sessions.begin("eve")
    assert check.remembers("eve", "old")
    assert sessions.of(secret) is not None
    (tmp_path / "new").write_text("eve:!old")
    (tmp_path / "new").rename(shadow)
    assert not check.remembers("eve", "old")
    assert sessions.of(secret) is None


def test_a_right_password_that_has_expired_is_in_the_log(account: tuple[str, str], caplog: pytest.LogCaptureFixture) -> None:
    name, password = account
    subprocess.run(["chage", "-d", "0", name], check=True, timeout=30)
    assert not Here().authenticate(name, password)
    [line] = [record.getMessage() for record in caplog.records if record.name == "synvirt.privileged"]
    assert f"the password of {name} was right" in line
    assert password not in line


def test_without_a_group_the_hosts_accounts_are_not_asked(tmp_path: Path) -> None:
    """Each of them would be let in, and be an admin."""
    with pytest.raises(BadRequest, match="no group of users is set"):
        authenticator(Settings(data_dir=tmp_path, auth="pam"), announce=lambda line: None)


def test_an_account_that_has_expired(account: tuple[str, str]) -> None:
    name, password = account
    subprocess.run(["chage", "--expiredate", "2020-01-01", name], check=True, timeout=30)
    with pytest.raises(Unauthorized):
        pam_accounts(Here("login"))(name, password, "")
