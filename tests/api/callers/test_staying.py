"""A stream or an upload ends once its caller would not be admitted any more, and goes on for all others."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import update

from synvirt.accounts import Role, remove_account, set_password
from synvirt.api.callers import auth, staying
from synvirt.api.callers.auth import Throttled
from synvirt.model.values import now
from synvirt.store.access import Token
from synvirt.store.tables import tokens
from tests.api.uploads.sending import FORM, GOOD, assert_nothing
from tests.fakes.service import PREFIX, Service, every_role

API, PASSWORD = "/api/v1", "pw"
STREAMS = [f"{PREFIX}/migrations/stream", f"{API}/backup/runs/stream", f"{API}/waves/stream", "/events?after=0"]
OURS = {"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "cors"}
# An open stream beats each 0.3 s in tests.
ENDS_WITHIN_S = 10.0


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Service, httpx.Client]]:
    """One account a role, named after it."""
    monkeypatch.setattr(staying, "CHECKED_EVERY_S", 0.2)
    monkeypatch.setattr(auth, "REMEMBERED_FOR_S", 0.0)
    accounts = every_role(tmp_path / "users", PASSWORD)
    service = Service(tmp_path, check_password=Throttled(accounts), role_of=accounts.role_of, tls=False, has_pages=True)
    with service.served() as server, httpx.Client(base_url=server.address, timeout=ENDS_WITHIN_S) as client:
        yield service, client
    service.close()


def token(service: Service, client: httpx.Client, role: Role = Role.VIEWER) -> tuple[dict[str, str], str]:
    made = client.post(f"{API}/tokens", auth=("admin", PASSWORD), json={"name": "ci", "role": role}).json()
    return {"Authorization": f"Bearer {made['secret']}"}, made["id"]


def cookie(client: httpx.Client) -> dict[str, str]:
    answer = client.post("/login", data={"user": "viewer", "password": PASSWORD}, headers=OURS)
    client.cookies.clear()
    return {"Cookie": answer.headers["Set-Cookie"].partition(";")[0]}


def basic() -> dict[str, str]:
    return {"Authorization": httpx.BasicAuth("viewer", PASSWORD)._auth_header}


def outlives(client: httpx.Client, path: str, headers: dict[str, str], event: Callable[[], Any]) -> bool:
    """Whether the stream, open at the event, goes on after it for ENDS_WITHIN_S."""
    with client.stream("GET", path, headers=headers) as answer:
        assert answer.status_code == 200, answer.read()
        pieces = answer.iter_raw()
        for _ in range(3):
            next(pieces)
        event()
        until = time.monotonic() + ENDS_WITHIN_S
        return any(time.monotonic() > until for _ in pieces)  # the end of the stream is a whole answer's: no error


@pytest.mark.parametrize("path", STREAMS)
def test_it_ends_when_its_token_is_revoked(served: tuple[Service, httpx.Client], path: str) -> None:
    service, client = served
    bearer, id_ = token(service, client)
    assert not outlives(client, path, bearer, lambda: client.delete(f"{API}/tokens/{id_}", auth=("admin", PASSWORD)))
    assert client.get(path, headers=bearer).status_code == 401


def test_it_ends_when_its_token_expires(served: tuple[Service, httpx.Client]) -> None:
    service, client = served
    bearer, id_ = token(service, client)

    def expire() -> None:
        with service.store._engine.begin() as db:
            kept = Token.model_validate_json(db.execute(tokens.select().where(tokens.c.id == id_)).one().document)
            db.execute(update(tokens).values(document=kept.model_copy(update={"expires_at": now()}).model_dump_json()))

    assert not outlives(client, STREAMS[0], bearer, expire)


@pytest.mark.parametrize("how", ["removed", "another password"])
def test_it_ends_when_its_account_is_no_more_what_it_was(
    served: tuple[Service, httpx.Client], tmp_path: Path, how: str
) -> None:
    users = tmp_path / "users"
    change = {
        "removed": lambda: remove_account(users, "viewer"),
        "another password": lambda: set_password(users, "viewer", "n"),
    }
    assert not outlives(served[1], STREAMS[0], basic(), change[how])


def test_it_ends_when_its_session_does(served: tuple[Service, httpx.Client]) -> None:
    client = served[1]
    session = cookie(client)
    assert not outlives(client, STREAMS[-1], session, lambda: client.post("/logout", headers=session | OURS))


def test_it_goes_on_while_others_guess_its_password(
    served: tuple[Service, httpx.Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    client = served[1]
    monkeypatch.setattr(f"{__name__}.ENDS_WITHIN_S", 1.5)

    def guess() -> None:
        answers = [client.get(f"{PREFIX}/migrations", auth=("viewer", f"guess {n}")).status_code for n in range(12)]
        assert answers[-1] == 429

    assert outlives(client, STREAMS[0], basic(), guess)


def test_it_goes_on_with_another_role_that_is_enough(
    served: tuple[Service, httpx.Client], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.ENDS_WITHIN_S", 1.5)
    client, operator = served[1], {"Authorization": httpx.BasicAuth("operator", PASSWORD)._auth_header}
    assert outlives(client, STREAMS[0], operator, lambda: set_password(tmp_path / "users", "operator", PASSWORD, Role.VIEWER))


@pytest.mark.parametrize("path", [f"{PREFIX}/uploads", "/uploads"])
def test_an_upload_ends_when_its_token_is_revoked(served: tuple[Service, httpx.Client], path: str) -> None:
    """It would be listed at its end, hours later, for a caller that is nobody any more."""
    service, client = served
    bearer, id_ = token(service, client, Role.OPERATOR)

    def body() -> Iterator[bytes]:
        yield GOOD.removesuffix(b"\r\n")
        revoked = client.delete(f"{API}/tokens/{id_}", auth=("admin", PASSWORD))
        assert revoked.status_code == 204
        until = time.monotonic() + ENDS_WITHIN_S
        while time.monotonic() < until:
            time.sleep(0.05)
            yield bytes(1000)
        yield b"\r\n--b--\r\n"

    with httpx.Client(base_url=client.base_url, timeout=60) as sender:
        answer = sender.post(path, headers=bearer | FORM | OURS, content=body())
    assert answer.status_code == 401
    assert "revoked" in answer.text
    assert_nothing(service)
