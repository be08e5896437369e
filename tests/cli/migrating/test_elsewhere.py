"""synvirt import URL and synvirt inspect URL: where credentials come from, and that they go nowhere else."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from synvirt.cli.migrating import elsewhere
from synvirt.cli.migrating.elsewhere import ElsewhereOptions, is_url, request
from tests.cli.conftest import Run
from tests.fakes.service import Service
from tests.offline import appliances
from tests.servers import remote_servers as servers


@pytest.fixture(scope="module")
def nginx(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Nginx]:
    with servers.nginx(tmp_path_factory.mktemp("nginx")) as server:
        appliances.archive(server.folder / "winsrv.ova", appliances.appliance())
        yield server


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    made = Service(tmp_path, has_pages=False, remote_allowed_hosts="127.0.0.1")
    with made.served():
        yield made
    made.close()


def private(nginx: servers.Nginx) -> list[str]:
    url = f"https://{servers.USER}@127.0.0.1:{nginx.tls_port}/private/winsrv.ova"
    return [url, "--remote-fingerprint", nginx.certificates.fingerprint]


def test_import_asks_for_the_password_and_shows_it_to_nobody(service: Service, run: Run, nginx: servers.Nginx) -> None:
    done = run("import", *private(nginx), typed=servers.PASSWORD + "\n")
    assert done.exit_code == 0, done.stderr
    (document,) = service.store.documents(limit=5)[0]
    ref = json.loads(document)["plan"]["source_ref"]
    assert (ref["kind"], ref["url"]) == ("remote_url", f"https://127.0.0.1:{nginx.tls_port}/private/winsrv.ova")
    assert json.loads(document)["plan"]["source"] == {"Offline": "ova_archive"}
    for text in (document, done.stdout, done.stderr):
        assert servers.PASSWORD not in text


def test_inspect_needs_no_service(run: Run, nginx: servers.Nginx, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYNVIRT_REMOTE_PASSWORD", servers.PASSWORD)
    done = run("inspect", *private(nginx), "--json")
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["offline_kind"] == "ova_archive"
    monkeypatch.setenv("SYNVIRT_REMOTE_PASSWORD", "hush-1")
    refused = run("inspect", *private(nginx))
    assert refused.exit_code == 1
    assert "401" in refused.stderr
    assert "hush-1" not in refused.stdout + refused.stderr


def test_a_service_elsewhere_reads_it(
    service: Service, run: Run, nginx: servers.Nginx, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elsewhere, "secret", lambda what: servers.PASSWORD)
    done = run("import", *private(nginx), "--json", "--kind", "ova_archive", "--no-start", "--name", "web")
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["name"] == "web"


@pytest.mark.parametrize("wrong", ["https://host/folder/", "s3://", "smb://nas/share", "https://ho st/x"])
def test_wrong_urls(service: Service, run: Run, wrong: str) -> None:
    for command in ("import", "inspect"):
        done = run(command, wrong)
        assert done.exit_code != 0
        assert done.stderr


def test_credentials_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "nas.toml"
    file.write_text('username = "importer"\npassword = "hush"\ndomain = "LAB"\n')
    body = request("smb://nas/share/x.vhdx", ElsewhereOptions(credentials=file), environ={})
    assert body["credentials"] == {"username": "importer", "password": "hush", "domain": "LAB"}
    file.write_text("password = 5")
    with pytest.raises(Exception, match="text in quotes"):
        request("smb://nas/share/x.vhdx", ElsewhereOptions(credentials=file), environ={})
    file.write_text("password: hush")
    with pytest.raises(Exception, match="not a TOML") as caught:
        request("smb://nas/share/x.vhdx", ElsewhereOptions(credentials=file), environ={})
    assert "hush" not in str(caught.value)
    with pytest.raises(Exception, match="cannot be read"):
        request("smb://nas/share/x.vhdx", ElsewhereOptions(credentials=tmp_path / "gone"), environ={})


def test_credentials_of_the_environment() -> None:
    environ = {
        "AWS_ACCESS_KEY_ID": "AKIA",
        "AWS_SECRET_ACCESS_KEY": "hush",
        "AWS_REGION": "eu-west-1",
        "AWS_ENDPOINT_URL_S3": "https://minio.example",
        "SYNVIRT_REMOTE_TOKEN": "t",
    }
    body = request("s3://bucket/a@b/x.ova", ElsewhereOptions(), environ=environ)
    assert body == {
        "url": "s3://bucket/a@b/x.ova",
        "credentials": {"access_key_id": "AKIA", "secret_access_key": "hush"},
        "options": {"endpoint": "https://minio.example", "region": "eu-west-1"},
    }
    assert request("https://host/x.ova", ElsewhereOptions(), environ=environ)["credentials"] == {"token": "t"}
    assert request("https://host/x.ova", ElsewhereOptions(), environ={}) == {
        "url": "https://host/x.ova",
        "credentials": {},
        "options": {},
    }


def test_who_logs_in() -> None:
    def ask(what: str) -> str:
        return f"<{what}>"

    named = request("https://host/x.ova", ElsewhereOptions(login="me"), environ={}, ask=ask)
    assert named["credentials"] == {"username": "me", "password": "<Password of me>"}
    whole = request("https://me:p%40ss@host/x?sig=a@b", ElsewhereOptions(), environ={}, ask=ask)
    assert (whole["url"], whole["credentials"]) == ("https://host/x?sig=a@b", {"username": "me", "password": "p@ss"})
    windows = request("smb://LAB;me@nas/share/x.vhdx", ElsewhereOptions(), environ={}, ask=ask)
    assert windows["url"] == "smb://nas/share/x.vhdx"
    assert windows["credentials"] == {"domain": "LAB", "username": "me", "password": "<Password of me>"}


def test_what_is_a_url() -> None:
    assert is_url("HTTPS://host/x")
    assert is_url("s3://b/k")
    assert not is_url("web.ova")
    assert not is_url("./https:/x")
    assert not is_url("C:/web.ova")


@pytest.mark.parametrize("command", ["inspect", "import"])
def test_a_url_of_another_kind_is_no_local_file(run: Run, service: Service, command: str) -> None:
    done = run(command, "ftp://me:hush@nas/web.ova")
    assert (done.exit_code, "hush" in done.stderr) == (2, False)
    assert "E_MIG_BAD_REQUEST: ftp:// is not read" in done.stderr
    assert "smb://" in done.stderr
