"""The bundle: what is in it, and that nothing secret is, wherever it was."""

import json
import tarfile
from pathlib import Path

import pytest

from synvirt.backups.model import BackupJobRequest, BackupRepositoryRequest
from synvirt.cli.operating import support_bundle as operating
from synvirt.model.job import Domain
from synvirt.model.kinds import State
from synvirt.model.problems import Problem
from synvirt.model.values import now
from tests.cli.conftest import Run
from tests.fakes.backups import ended
from tests.fakes.service import Service
from tests.security.test_redacting import SECRET as SHAPED
from tests.security.test_redacting import SHAPES

SECRET = "Zq8-vexed-otter"


def contents(path: Path) -> dict[str, str]:
    with tarfile.open(path) as archive:
        found = {}
        for member in archive.getmembers():
            file = archive.extractfile(member)
            assert file is not None
            assert member.mode == 0o600
            found[member.name.partition("/")[2]] = file.read().decode()
        return found


def plant(service: Service, tmp_path: Path) -> None:
    """In jobs, sources, logs: in each shape that a secret has been seen in."""
    job = service.submit()
    xml = f"<domain><graphics type='vnc' passwd='{SECRET}'/></domain>"
    domain = Domain(name="web", uuid=str(job.id), xml=xml)
    error = Problem(
        code="E_MIG_SOURCE_UNREACHABLE",
        message=f"GET https://mover:{SECRET}@nas.example/a.ova?X-Amz-Signature={SECRET}: 403",
        hint=f"curl --password {SECRET}",
        at=now(),
        state=State.QUEUED,
    )
    service.store.change(job.id, State.QUEUED, lambda job: job.model_copy(update={"domain": domain}))
    service.move(job.id, State.FAILED, error=error)
    lines = [
        json.dumps({"event": "asked", "headers": {"Authorization": f"Basic {SECRET}"}}),
        json.dumps({"event": json.dumps({"password": SECRET})}),
        f"secret_access_key={SECRET} region=eu",
        f"-----BEGIN PRIVATE KEY-----\n{SECRET}\n-----END PRIVATE KEY-----",
        f"connected to postgresql://synvirt:{SECRET}@db/synvirt",
        f"SYNVIRT_RECOVERY_KEY={SECRET}",
        "a line that stays",
    ]
    (tmp_path / "demo.log").write_text("\n".join(lines))
    known = BackupRepositoryRequest(name="here", kind="local", path=str(_empty(tmp_path / "repository")))
    repository = service.backups.add_repository(known)
    made = BackupJobRequest(name="nightly", vm_ids=(f"qemu+ssh://root:{SECRET}@host/x",), repository_id=repository.id)
    ended(service.backups, service.backups.run_job(service.backups._jobs.add(made).id).id)


def _empty(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_nothing_secret_is_in_it(service: Service, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(service, tmp_path)
    with service.local() as client:
        source = {
            "name": "lab",
            "kind": "vim_api",
            "endpoint": "https://vcenter.example",
            "credentials": {"user": "mover@vsphere.local", "password": SECRET},
        }
        assert client.post("/sources", json=source).status_code == 201
    monkeypatch.setenv("SYNVIRT_REMOTE_PASSWORD", f"{SECRET}-2")
    monkeypatch.setenv("SYNVIRT_PASSPHRASE", f"{SECRET}-3")
    shapes = "\n\n".join(shape.replace(SHAPED, SECRET) for shape in SHAPES)
    (tmp_path / "other.txt").write_text(f"the password is {SECRET}-2\nno: p = {SECRET}-2\nopened by {SECRET}-3\n{shapes}")
    config = tmp_path / "synvirt.toml"
    config.write_text(f'database_url = "postgresql://synvirt:{SECRET}@db.example/synvirt"\n')
    out = tmp_path / "help.tar.gz"
    done = run("support-bundle", out, "--log", tmp_path / "other.txt", "--config", config)
    assert done.exit_code == 0, done.stderr
    assert SECRET not in done.stdout
    found = contents(out)
    assert {name for name, text in found.items() if SECRET in text} == set()
    assert oct(out.stat().st_mode & 0o777) == "0o600"
    assert set(found) >= {
        "about.json", "settings.json", "doctor.json", "migrations.json", "sources.json", "logs/demo.log", "logs/other.txt"
    }  # fmt: skip
    # … and what helps is left.
    assert json.loads(found["migrations.json"])["items"][0]["last_error"]["code"] == "E_MIG_SOURCE_UNREACHABLE"
    assert "nas.example/a.ova" in found["migrations.json"]
    assert json.loads(found["sources.json"])["items"][0]["endpoint"] == "https://vcenter.example"
    assert {check["name"] for check in json.loads(found["doctor.json"])["checks"]}
    assert "db.example/synvirt" in json.loads(found["settings.json"])["database_url"]
    assert json.loads(found["backup-runs.json"])["items"][0]["error"]["code"] == "E_BAK_NOT_FOUND"
    assert json.loads(found["backup-jobs.json"])["items"][0]["name"] == "nightly"
    assert json.loads(found["backup-repositories.json"])["items"][0]["points_count"] == 0
    assert "a line that stays" in found["logs/demo.log"]
    assert "keyring" not in " ".join(found)


@pytest.mark.parametrize("password", [f"/{SECRET}", f"12#{SECRET}", f"?{SECRET}", f"%2F{SECRET}"])
def test_no_part_of_the_settings_shows_a_secret(tmp_path: Path, run: Run, password: str) -> None:
    """A database's password may begin with what ends a URL's host, and a command's arguments are anything."""
    config, out = tmp_path / "synvirt.toml", tmp_path / "help.tar.gz"
    argv = ["/usr/bin/curl", "--oauth2-bearer", SECRET, "-u", f"me:{SECRET}", f"https://hooks.example/services/{SECRET}"]
    config.write_text(
        f'database_url = "postgresql://synvirt:{password}@db.example/synvirt"\n'
        f"[wave_commands.chat]\nargv = {json.dumps(argv)}\n"
    )
    (tmp_path / "demo.log").write_text(f"cannot connect to postgresql://synvirt:{password}@db.example/synvirt")
    assert run("support-bundle", out, "--config", config, "--data-dir", tmp_path).exit_code == 0
    found = contents(out)
    assert {name for name, text in found.items() if SECRET in text} == set()
    settings = json.loads(found["settings.json"])
    assert settings["database_url"].endswith("@db.example/synvirt")
    assert settings["wave_commands"]["chat"]["argv"][0] == "/usr/bin/curl"


def test_a_secret_that_begins_before_the_end_of_a_long_log_is_not_in_it(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the end of a long log is packed. What says that it is a secret is before that."""
    monkeypatch.setattr(operating, "LOG_BYTES_MAX", 200)
    begins = json.dumps({"event": "asked", "password": f"{'x' * 60}{SECRET}{'y' * 40}"})
    key = f"-----BEGIN PRIVATE KEY-----\n{'k' * 64}\n{SECRET}\n-----END PRIVATE KEY-----"
    for name, secret in (("line", begins), ("key", key)):
        (tmp_path / f"{name}.log").write_text(f"{secret}\n{'a line that stays'.ljust(199 - len(SECRET) - 50, '.')}\n")
    out = tmp_path / "help.tar.gz"
    assert run("support-bundle", out, "--data-dir", tmp_path).exit_code == 0
    found = contents(out)
    assert [name for name, text in found.items() if SECRET in text] == []
    assert [found[f"logs/{name}.log"].strip(".\n")[-17:] for name in ("line", "key")] == ["a line that stays"] * 2


def test_logs_of_one_name_are_all_in_it(tmp_path: Path, run: Run) -> None:
    """Before, the second took the first one's place as soon as the archive was unpacked."""
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "synvirt.log").write_text(f"of {folder}")
    out, own = tmp_path / "help.tar.gz", tmp_path / "synvirt.log"
    own.write_text("its own")
    logs = [tmp_path / "a/synvirt.log", tmp_path / "b/synvirt.log", own]
    asked = [word for log in logs for word in ("--log", log)]
    assert run("support-bundle", out, *asked, "--data-dir", tmp_path).exit_code == 0
    found = {name: text for name, text in contents(out).items() if name.startswith("logs/synvirt")}
    assert sorted(found.values()) == ["its own", "of a", "of b"]


def test_it_is_made_without_the_service_too(tmp_path: Path, run: Run) -> None:
    service = Service(tmp_path)
    job = service.submit()
    service.close()
    done = run("support-bundle", tmp_path / "b.tar.gz", "--json")
    assert done.exit_code == 0, done.stderr
    reported = json.loads(done.stdout)
    assert reported["path"] == str(tmp_path / "b.tar.gz")
    found = contents(tmp_path / "b.tar.gz")
    assert set(found) == set(reported["files"])
    jobs = json.loads(found["migrations.json"])
    assert [one["id"] for one in jobs["items"]] == [str(job.id)]
    assert "no service answers" in jobs["service"]
    assert json.loads(found["backup-runs.json"])["items"] == []
    assert "no service answers" in json.loads(found["sources.json"])["missing"]


def test_a_part_that_breaks_in_any_way_stops_no_other(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(_: object) -> None:
        raise TypeError("a library of another version")

    monkeypatch.setattr("synvirt.doctor.examine", breaks)
    bundle = tmp_path / "b.tar.gz"
    assert run("support-bundle", bundle).exit_code == 0
    found = contents(bundle)
    assert json.loads(found["doctor.json"]) == {"missing": "TypeError: a library of another version"}
    assert "settings.json" in found


def test_it_is_made_where_there_is_nothing_at_all(tmp_path: Path, run: Run) -> None:
    done = run("support-bundle", tmp_path / "b.tar.gz")
    assert done.exit_code == 0, done.stderr
    assert "cannot be read" in json.loads(contents(tmp_path / "b.tar.gz")["migrations.json"])["missing"]


def test_what_is_there_stays(tmp_path: Path, run: Run) -> None:
    (tmp_path / "b.tar.gz").write_text("mine")
    done = run("support-bundle", tmp_path / "b.tar.gz")
    assert (done.exit_code, (tmp_path / "b.tar.gz").read_text()) == (1, "mine")
    assert "E_MIG_CONFLICT" in done.stderr


def test_a_place_that_cannot_be_written_is_named_and_nothing_is_left(tmp_path: Path, run: Run) -> None:
    done = run("support-bundle", tmp_path / "nowhere" / "b.tar.gz")
    assert done.exit_code == 1
    assert f"{tmp_path}/nowhere/b.tar.gz cannot be written: No such file or directory" in done.stderr
    assert not list(tmp_path.glob(".*.part"))
