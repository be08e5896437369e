"""Logging in by an OpenID provider: a real one, whose answers are bent, and everything that is refused."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import httpx
import pytest
from joserfc import jwt
from joserfc.jwk import ECKey
from structlog.testing import capture_logs

from synvirt import outgoing
from synvirt.accounts import Role
from synvirt.api.callers.oidc import BEGUN_FOR_S, BEGUN_MAX, BEGUN_MAX_NETWORK, COOKIE, Oidc, oidc
from synvirt.api.callers.provider import KEYS_AGAIN_S
from synvirt.api.callers.provider import Provider as Asked
from synvirt.api.callers.sessions import COOKIE as SESSION
from synvirt.errors import BadRequest, SourceUnreachable, Unauthorized
from synvirt.settings import Settings, load
from synvirt.transport import Trust
from tests.fakes.service import PREFIX, Service
from tests.running.ports import free_port
from tests.servers.oidc import CLIENT, SECRET, Provider, led_to, logged_in_at, provided

OURS = {"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "navigate"}
# What a browser says when the provider's page sends it here.
BACK = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}


@dataclass
class Site:
    provider: Provider
    service: Service
    client: httpx.Client

    def begin(self, **fields: str) -> tuple[str, str]:
        """The provider's address, and the cookie that the browser keeps meanwhile."""
        page = self.client.post("/kvm/login/oidc", data={"next": "", **fields}, headers=OURS)
        self.client.cookies.clear()
        assert page.status_code == 200, page.text
        cookie = page.headers["Set-Cookie"]
        assert {part.strip().lower() for part in cookie.split(";")[1:]} == {
            "httponly",
            "secure",
            "samesite=lax",
            "path=/",
            f"max-age={BEGUN_FOR_S:.0f}",
        }
        return led_to(page), cookie.partition(";")[0]

    def come(self, address: str, cookie: str) -> httpx.Response:
        """The browser comes back from the provider."""
        assert address.startswith(self.provider.redirect_uri + "?"), address
        back = self.client.get(address, headers=BACK | {"Cookie": cookie})
        self.client.cookies.clear()
        return back

    def log_in(self, user: str, **fields: str) -> httpx.Response:
        address, cookie = self.begin(**fields)
        return self.come(logged_in_at(address, user), cookie)

    def entries(self) -> list[tuple[str, str, str, str, int]]:
        found, _ = self.service.store.audit.page(limit=500)
        return [(one.method, one.resource, one.account, one.role, one.result) for one in found]

    def refused(self) -> float:
        metrics = self.client.get("/metrics", auth=("admin", "correct horse")).text
        return float(next(line for line in metrics.splitlines() if line.startswith("synvirt_logins_refused_total")).split()[1])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder, port = tmp_path_factory.mktemp("provider"), free_port()
    address = f"https://127.0.0.1:{port}"
    with provided(folder, f"{address}/kvm/login/oidc/callback") as provider:
        data = tmp_path_factory.mktemp("service")
        service = Service(data, listen=f"127.0.0.1:{port}", base_url="/kvm", **provider.settings)
        with service.served(), httpx.Client(base_url=address, verify=False, timeout=60) as client:
            yield Site(provider, service, client)
        service.close()


def session(answer: httpx.Response) -> dict[str, str]:
    assert answer.status_code == 200, answer.text
    [cookie] = [one for one in answer.headers.get_list("Set-Cookie") if one.startswith(SESSION + "=")]
    assert {part.strip().lower() for part in cookie.split(";")[1:]} == {"httponly", "secure", "samesite=strict", "path=/"}
    return {"Cookie": cookie.partition(";")[0]}


def test_a_person_logs_in_and_has_the_role_of_a_group(site: Site) -> None:
    page = site.client.get("/kvm/login")
    assert "Log in by Lab" in page.text
    with capture_logs() as logs:
        answer = site.log_in("anna", next="/kvm/uploads")
    assert led_to(answer) == "/kvm/uploads"
    anna, olga = session(answer), session(site.log_in("olga"))
    home = site.client.get("/kvm/", headers=anna)
    assert ("oidc:anna" in home.text, ">Audit<" in home.text) == (True, True)
    assert site.client.get("/kvm/api/v1/audit", headers=anna).status_code == 200
    assert site.client.get("/kvm/api/v1/audit", headers=olga).status_code == 403
    assert site.client.post(f"/kvm{PREFIX}/migrations", headers=olga | OURS, json={}).status_code == 400, "an operator may"
    assert [(e["account"], e["role"]) for e in logs if e["event"].startswith("logged in")] == [("oidc:anna", "admin")]
    entries = [e for e in site.entries() if e[0] == "LOGIN" and e[1] == "oidc"]
    assert entries[:2] == [("LOGIN", "oidc", "oidc:olga", "operator", 200), ("LOGIN", "oidc", "oidc:anna", "admin", 200)]


def test_requests_to_the_provider(site: Site) -> None:
    query = parse_qs(urlsplit(site.begin()[0]).query)
    again = parse_qs(urlsplit(site.begin()[0]).query)
    assert (query["response_type"], query["client_id"], query["code_challenge_method"]) == (["code"], [CLIENT], ["S256"])
    assert query["scope"] == ["openid profile email"]
    for name in ("state", "nonce", "code_challenge"):
        assert (len(query[name][0]), query[name] != again[name]) == (43, True)
    assert len({query[name][0] for name in ("state", "nonce", "code_challenge")}) == 3


def test_log_out(site: Site) -> None:
    cookie = session(site.log_in("anna"))
    left = site.client.post("/kvm/logout", headers=cookie | OURS)
    assert f'href="https://localhost:{site.provider.port}/o/logout/?client_id={CLIENT}"' in left.text
    assert "Max-Age=0" in left.headers["Set-Cookie"]
    assert site.client.get("/kvm/api/v1/audit", headers=cookie).status_code == 401
    assert site.entries()[0] == ("LOGOUT", "oidc", "oidc:anna", "admin", 200)


NOW = int(time.time())
BENT: dict[str, dict[str, Any]] = {
    "nonce": {"nonce": "another"},
    "no nonce": {"nonce": None},
    "nonce is half a letter": {"nonce": "\ud800"},
    "audience": {"aud": "another"},
    "audiences": {"aud": [CLIENT, "another"]},
    "authorized party": {"aud": [CLIENT], "azp": "another"},
    "issuer": {"iss": "https://localhost/o"},
    "expired": {"exp": NOW - 3600},
    "expiry is no number": {"exp": "tomorrow"},
    "expiry is true": {"exp": True},
    "expiry is not a number": {"exp": float("nan")},
    "expiry is never": {"exp": float("inf")},
    "expiry is 400 digits": {"exp": 10**400},
    "issued long ago": {"iat": NOW - 86400, "exp": NOW + 86400},
    "issued tomorrow": {"iat": NOW + 86400, "exp": NOW + 2 * 86400},
    "not yet": {"nbf": NOW + 86400},
    "nobody": {"sub": ""},
    "subject is not a text": {"sub": 7},
    "subject is half a letter": {"sub": "\ud800"},
    "unsigned": {"alg": "none"},
    "signed by a secret": {"alg": "HS256"},
    "signed by a stranger": {"alg": "stranger"},
}


@pytest.mark.parametrize("how", BENT)
def test_a_token_that_is_not_right(site: Site, how: str) -> None:
    before = site.refused()
    with site.provider.bent(BENT[how]), capture_logs() as logs:
        answer = site.log_in("anna")
    assert (answer.status_code, f"{SESSION}=" in str(answer.headers)) == (401, False), how
    assert "ID token is refused" in answer.text, how
    assert [entry["address"] for entry in logs if entry["event"] == "login refused"] == ["127.0.0.1"]
    assert site.refused() == before + 1
    assert any(e[1:] == ("oidc", "oidc:", "", 401) for e in site.entries())


def test_what_is_bent_and_still_right(site: Site) -> None:
    """The bending itself refuses nothing."""
    for claims in ({}, {"aud": [CLIENT]}, {"aud": [CLIENT, "another"], "azp": CLIENT}, {"exp": int(time.time()) + 600}):
        with site.provider.bent(claims):
            session(site.log_in("anna"))


@pytest.mark.parametrize("groups", [[], "guests", ["guests", 7], None, {"virt-admins": 1}])
def test_who_has_no_role_is_not_let_in(site: Site, groups: object) -> None:
    with site.provider.bent({"groups": groups}):
        answer = site.log_in("anna")
    assert (answer.status_code, f"{SESSION}=" in str(answer.headers)) == (403, False)
    assert "none of your groups has a role here" in answer.text
    assert site.log_in("gast").status_code == 403
    refused = [e for e in site.entries() if e[1] == "oidc" and e[4] == 403]
    assert all(e[2].startswith("oidc:") and len(e[2]) > len("oidc:") for e in refused), "the provider said who it was"


def test_a_state_is_good_once_in_the_browser_that_has_begun(site: Site) -> None:
    address, cookie = site.begin()
    back = logged_in_at(address, "anna")
    session(site.come(back, cookie))
    for again in (back, logged_in_at(address, "anna")):
        replayed = site.come(again, cookie)
        assert (replayed.status_code, "was not started here" in replayed.text) == (401, True)
    begun, mine = site.begin()
    _, other = site.begin()
    for wrong in (other, "", f"{COOKIE}=x"):
        begun, mine = site.begin()
        led = logged_in_at(begun, "anna")
        assert "another browser" in site.come(led, wrong).text, "a link logs nobody in"
        assert site.come(led, mine).status_code == 401, "and is used up"


def test_an_answer_that_is_none(site: Site) -> None:
    answers: list[dict[str, str]] = [{"error": "access_denied"}, {}, {"code": ""}, {"code": "x" * 5000}, {"code": "made-up"}]
    for answer in answers:
        address, cookie = site.begin()
        query = {"state": parse_qs(urlsplit(address).query)["state"][0], **answer}
        assert site.come(f"{site.provider.redirect_uri}?{urlencode(query)}", cookie).status_code == 401, answer
    address, cookie = site.begin()
    mixed = logged_in_at(address, "anna") + "&iss=https%3A%2F%2Felsewhere.example"
    assert "another provider answered" in site.come(mixed, cookie).text
    for made_up in ("", "?state=x&code=y", "?state=%FF&code=y"):
        assert site.client.get(f"/kvm/login/oidc/callback{made_up}", headers=BACK).status_code == 401
    foreign = site.client.post("/kvm/login/oidc", headers={"Sec-Fetch-Site": "cross-site"})
    assert foreign.status_code == 403, "no other site makes us ask the provider"


def test_another_secret_is_refused_and_no_secret_is_shown(site: Site) -> None:
    file = site.provider.folder / "secret"
    file.write_text("wrong")
    try:
        answer = site.log_in("anna")
    finally:
        file.write_text(SECRET)
    assert (answer.status_code, "invalid_client" in answer.text, "wrong" in answer.text) == (401, True, False)


def made(site: Site, **changed: object) -> Oidc:
    settings = Settings.model_validate({"data_dir": site.service.settings.data_dir} | site.provider.settings | changed)
    found = oidc(settings.model_copy(update={"base_url": "/kvm"}))
    assert found is not None
    return found


def test_it_is_reached_by_the_guard_and_held_to_its_certificate(site: Site) -> None:
    outgoing.permit(["elsewhere.example"])
    try:
        with pytest.raises(BadRequest, match="is not among the hosts"):
            made(site).begin("", "")
    finally:
        outgoing.permit([])
    for changed in ({"oidc_fingerprint_sha256": "00" * 32}, {"oidc_fingerprint_sha256": ""}):
        with pytest.raises(SourceUnreachable):
            made(site, **changed).begin("", "")
    with pytest.raises(SourceUnreachable, match="names itself"):
        made(site, oidc_issuer=f"{site.provider.issuer}/").begin("", "")
    assert made(site).begin("", "").url.startswith(f"{site.provider.issuer}/authorize/?")


def test_a_role_ends_with_the_settings_that_gave_it(site: Site, tmp_path: Path) -> None:
    before = made(site)
    assert before.grants == made(site).grants
    assert before.grants != made(site, oidc_roles={"staff": "admin"}).grants


def test_a_log_in_that_was_begun_is_forgotten() -> None:
    at = 0.0
    provider = Asked("https://localhost/o", CLIENT, secret=str, trust=Trust(), clock=lambda: at)
    known = Oidc(
        provider,
        redirect_uri="https://here/login/oidc/callback",
        scopes=("openid",),
        roles_claim="realm_access.roles",
        roles={"a": Role.ADMIN, "v": Role.VIEWER},
        name_claim="name",
        label="",
        clock=lambda: at,
    )
    provider._found = (0.0, made_up())
    begun = [known.begin("192.0.2.1", "") for _ in range(BEGUN_MAX_NETWORK + 1)]
    state = [parse_qs(urlsplit(one.url).query)["state"][0] for one in begun]
    for lost in (0,):
        with pytest.raises(Unauthorized, match="was not started"):
            known.end({"state": state[lost], "error": "x"}, begun[lost].browser, lambda who, error: None)
    with pytest.raises(Unauthorized, match="did not log you in"):
        known.end({"state": state[1], "error": "x"}, begun[1].browser, lambda who, error: None)
    for number in range(BEGUN_MAX + 5):
        known.begin(f"2001:db8:{number:x}::1", "")
    assert len(known._begun) == BEGUN_MAX
    late = known.begin("192.0.2.2", "")
    at = BEGUN_FOR_S
    with pytest.raises(Unauthorized, match="has already ended"):
        known.end(
            {"state": parse_qs(urlsplit(late.url).query)["state"][0], "error": "x"}, late.browser, lambda who, error: None
        )
    assert known._role({"realm_access": {"roles": ["v", "a"]}}) is Role.ADMIN, "the highest, one within another"
    assert known._role({"realm_access.roles": "v"}) is Role.VIEWER
    assert known._role({"realm_access": ["roles"]}) is None
    assert known._name({"sub": "7", "name": "a\nb"}) == "7", "no name that could write a line of the log"


def made_up() -> Any:
    from synvirt.api.callers.provider import Found

    address = "https://localhost/o/x"
    return Found(authorize=address, token=address, keys=address, ends="", by_post=False, names_itself=False)


@pytest.mark.parametrize(
    ("changed", "names"),
    [
        ({"oidc_client_id": ""}, "oidc_client_id"),
        ({"oidc_roles": {}}, "oidc_roles"),
        ({"oidc_redirect_uri": ""}, "oidc_redirect_uri"),
        ({"oidc_redirect_uri": "https://127.0.0.1/login/oidc/callback"}, "oidc_redirect_uri"),
        ({"oidc_scopes": ["profile"]}, "oidc_scopes"),
        ({"oidc_client_secret_file": "/nowhere"}, "oidc_client_secret_file"),
    ],
)
def test_settings_that_cannot_be(site: Site, changed: dict[str, object], names: str) -> None:
    with pytest.raises(BadRequest, match=f"setting {names}"):
        made(site, **changed)


def test_settings_by_file_and_environment(tmp_path: Path) -> None:
    file = tmp_path / "synvirt.toml"
    file.write_text('[oidc]\nissuer = "https://id.example"\nscopes = ["openid"]\n[oidc.roles]\n"virt-admins" = "admin"\n')
    settings = load(config=file, environ={})
    assert (settings.oidc_issuer, settings.oidc_roles) == ("https://id.example", {"virt-admins": "admin"})
    assert load(environ={"SYNVIRT_OIDC_ROLES": "a = admin,cn=b=viewer"}).oidc_roles == {"a": "admin", "cn=b": "viewer"}
    for issuer in ("http://id.example", "id.example", "https://id.example?x"):
        with pytest.raises(BadRequest, match="oidc_issuer"):
            load(environ={"SYNVIRT_OIDC_ISSUER": issuer})
    assert oidc(load(environ={})) is None


def test_nothing_of_it_is_there_without_it(tmp_path: Path) -> None:
    service = Service(tmp_path, tls=False)
    with service.served() as server, httpx.Client(base_url=server.address, timeout=60) as client:
        assert "oidc" not in client.get("/login").text
        assert client.post("/login/oidc", data={"next": ""}, headers=OURS).status_code == 404
        assert client.get("/login/oidc/callback?state=x", headers=BACK).status_code == 404
    service.close()


def test_a_renewed_key_without_an_id_is_fetched_again_once_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, fetched, at = [ECKey.generate_key("P-256") for _ in range(2)], list[int](), [time.time()]
    published = [0]

    def asked(_: Asked, url: str) -> dict[str, object]:
        fetched.append(published[0])
        return {"keys": [keys[published[0]].as_dict(private=False)]}

    monkeypatch.setattr(Asked, "found", lambda _: SimpleNamespace(keys="https://localhost/keys"))
    monkeypatch.setattr(Asked, "_asked", asked)
    provider = Asked("https://localhost", CLIENT, secret=lambda: "", trust=Trust(), clock=lambda: at[0])

    def is_taken(number: int) -> bool:
        claims = {"iss": "https://localhost", "aud": CLIENT, "sub": "anna", "nonce": "n", "iat": at[0], "exp": at[0] + 60}
        try:
            return bool(provider.claims(jwt.encode({"alg": "ES256"}, claims, keys[number]), "n"))
        except Unauthorized:
            return False

    assert (is_taken(0), is_taken(1), fetched) == (True, False, [0])
    published[0] = 1
    assert (is_taken(1), fetched) == (False, [0])
    at[0] += KEYS_AGAIN_S
    assert (is_taken(1), is_taken(0), fetched) == (True, False, [0, 1])
