"""A token may do what the account that made it may do now, and no more."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from synvirt.accounts import FileAccounts, Role, remove_account, set_password
from synvirt.api.callers.auth import Throttled
from synvirt.errors import Forbidden
from tests.fakes.service import PREFIX, Service, every_role

API, PASSWORD = "/api/v1", "pw"


class Accounts(FileAccounts):
    """Accounts of a users file, some of which have lost the host's groups that gave them a role."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.without_a_group: set[str] = set()

    def role_of(self, user: str) -> Role:
        if user in self.without_a_group:
            raise Forbidden(f"the account {user} is in none of the groups that may use this service")
        return super().role_of(user)


@pytest.fixture
def accounts(tmp_path: Path) -> Accounts:
    every_role(tmp_path / "users", PASSWORD)
    set_password(tmp_path / "users", "eve", PASSWORD, Role.ADMIN)
    return Accounts(tmp_path / "users")


@pytest.fixture
def client(tmp_path: Path, accounts: Accounts) -> Iterator[httpx.Client]:
    service = Service(tmp_path, check_password=Throttled(accounts), role_of=accounts.role_of, tls=False)
    with service.served() as server, httpx.Client(base_url=server.address, timeout=60) as client:
        yield client
    service.close()


def made(client: httpx.Client, **by: object) -> dict[str, str]:
    """The header of a new admin's token."""
    answer = client.post(f"{API}/tokens", json={"name": "ci", "role": "admin"}, **by)  # type: ignore[arg-type]
    assert answer.status_code == 201, answer.text
    return {"Authorization": f"Bearer {answer.json()['secret']}"}


def statuses(client: httpx.Client, token: dict[str, str]) -> tuple[int, int]:
    """Of a request for viewers, and of one for admins."""
    return client.get(f"{PREFIX}/migrations", headers=token).status_code, client.get(f"{API}/tokens", headers=token).status_code


def test_a_token_has_no_higher_role_than_its_account_has_now(client: httpx.Client, tmp_path: Path) -> None:
    """An admin who became a viewer stayed admin by a token of before."""
    token = made(client, auth=("eve", PASSWORD))
    assert statuses(client, token) == (200, 200)
    set_password(tmp_path / "users", "eve", PASSWORD, Role.VIEWER)
    assert statuses(client, token) == (200, 403)
    set_password(tmp_path / "users", "eve", PASSWORD, Role.ADMIN)
    assert statuses(client, token) == (200, 200)


@pytest.mark.parametrize("how", ["removed", "without a group"])
def test_a_token_ends_with_its_account(client: httpx.Client, accounts: Accounts, tmp_path: Path, how: str) -> None:
    """Also one that was made by such a token: else the account could prepare for its end."""
    token = made(client, auth=("eve", PASSWORD))
    by_token = made(client, headers=token)
    if how == "removed":
        remove_account(tmp_path / "users", "eve")
    else:
        accounts.without_a_group.add("eve")
    for ended in (token, by_token):
        answer = client.get(f"{PREFIX}/migrations", headers=ended)
        assert answer.status_code == 401
        assert "the account eve" in answer.json()["detail"]
    listed = client.get(f"{API}/tokens", auth=("admin", PASSWORD)).json()["items"]
    assert [one["account"] for one in listed] == ["eve", "eve"]


def test_a_token_of_the_socket_has_no_account_that_could_end(tmp_path: Path, accounts: Accounts) -> None:
    service = Service(tmp_path, check_password=Throttled(accounts), role_of=accounts.role_of, tls=False)
    with service.served() as server, service.local() as local, httpx.Client(base_url=server.address, timeout=60) as client:
        answer = local.post(local.base_url.copy_with(path=f"{API}/tokens"), json={"name": "ci", "role": "admin"})
        token = {"Authorization": f"Bearer {answer.json()['secret']}"}
        assert statuses(client, token) == (200, 200)
    service.close()
