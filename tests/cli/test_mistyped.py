"""What a person mistypes: the name that was probably meant is shown, in words, and as JSON where JSON is asked for."""

import json
from pathlib import Path

import pytest

from synvirt.cli.disk import program as disk
from synvirt.nearest import did_you_mean, did_you_mean_file
from tests.cli.conftest import Run
from tests.fakes.service import Service

# Where a file or folder is named; {} is called nearly as one that is there.
FILES = (
    "inspect {}",
    "import {}",
    "import {} --upload",
    "uploads add {}",
    "migrations dry-run {}",
    "migrations submit {}",
    "disk info {}",
    "disk map {}",
    "disk convert {} x.raw",
    "disk compare {} {}",
    "disk verify {} --ledger {}",
    "disk info --key-file {} x.qcow2",
    "waves import {}",
    "waves replace 00000000-0000-0000-0000-000000000001 {}",
    "waves simulate 00000000-0000-0000-0000-000000000001 --what-if {}",
    "receipt verify {}",
    "receipt verify . --key {}",
    "receipt verify . --chain {}",
    "receipt verify . --tsa-roots {}",
    "receipt verify . --volume vda={}",
    "sources add lab qemu+ssh://host/system --credential ssh_key=@{}",
    "inspect https://files.example/web.ova --credentials {}",
    "doctor --config {}",
    "migrations list --server https://192.0.2.1 --cacert {}",
)


@pytest.mark.parametrize("where", ["here", "named"])
@pytest.mark.parametrize("line", FILES)
def test_a_file_that_is_nearly_called_so_is_named_wherever_one_is_asked_for(
    service: Service,
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    *,
    line: str,
    where: str,
) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "web01.qcow2").write_bytes(b"not looked at")
    monkeypatch.chdir(folder)
    before = "" if where == "here" else f"{folder}/"
    done = run(*line.format(*[f"{before}wbe01.qcow2"] * 2).split())
    assert done.exit_code != 0
    assert f"did you mean {before}web01.qcow2?" in done.stderr + capfd.readouterr().err


def test_a_folder_that_is_nearly_called_so_is_named(run: Run, tmp_path: Path) -> None:
    (tmp_path / "exports").mkdir()
    done = run("waves", "import", tmp_path / "exprots" / "november.xlsx")
    assert f"did you mean {tmp_path}/exports?" in done.stderr


def test_what_lies_in_the_import_root_is_named_by_the_service(service: Service, run: Run) -> None:
    (service.settings.imports_dir / "exports").mkdir()
    (service.settings.imports_dir / "exports" / "web01.qcow2").write_bytes(b"not looked at")
    (service.settings.imports_dir / ".secret").write_bytes(b"")
    assert "did you mean exports?" in run("files", "exprots").stderr
    assert "did you mean exports?" in run("files", "exprots/2026/november").stderr
    assert "hint" not in run("files", "secret").stderr
    with service.local() as client:
        for path in ("exports/wbe01.qcow2", str(service.settings.imports_dir / "exports/wbe01.qcow2")):
            found = client.post("/host-files/inspect", json={"path": path}).json()
            assert found["hint"] == f"did you mean {path.replace('wbe', 'web')}?"
        assert client.get("/host-files", params={"path": "a/" * 2000}).json().get("hint") is None


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("sources show lba", "did you mean lab?"),
        ("sources vms lba", "did you mean lab?"),
        ("import web --source lba", "did you mean lab?"),
        ("migratons list", "Did you mean 'migrations'?"),
        ("tokens add x", "No such command 'add'. Did you mean 'create'?"),
        ("tokens delete x", "No such command 'delete'. Did you mean 'revoke'?"),
        ("migrations delete x", "Did you mean 'remove'?"),
        ("backup jobs-of-mine", "There are: "),
        ("tokens xyz", "No such command 'xyz'. There are: create, list, revoke"),
        ("import web.ova --nmae x", "--name"),
        ("import web.ova --mode wram", "wram is none of warm, cold; did you mean warm?"),
        ("import web.ova --kind qcow", "did you mean qcow2?"),
        ("import web.ova --disk-bus virtoi", "did you mean virtio?"),
        ("sources add new https://vc.example --kind vim", "did you mean vim_api?"),
        ("accounts add eve --role amdin", "did you mean admin?"),
        ("completion bahs", "bahs is none of bash, zsh, fish; did you mean bash?"),
        ("waves select x --source lab --power of", "did you mean off?"),
        ("waves list --state runing", "did you mean running?"),
        ("migrations list --state Faild", "did you mean Failed?"),
    ],
)
def test_a_name_that_is_nearly_called_so_is_named(service: Service, run: Run, line: str, message: str) -> None:
    added = run("sources", "add", "lab", "https://vc.example", "--kind", "vim_api", "--source-user", "u", typed="secret\n")
    assert added.exit_code == 0, added.stderr
    done = run(*line.split())
    assert (done.exit_code != 0, message in done.stderr) == (True, True), done.stderr


@pytest.mark.parametrize("at", ["before", "after"])
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("import web.ova --nmae x", "--nmae"),
        ("import web.ova --cpus many", "must be a whole number"),
        ("import web.ova --cpus 0", "must be greater than or equal to 1"),
        ("import web.ova --mode wram", "wram is none of"),
        ("migrations shwo", "shwo"),
        ("migrations show", "ID"),
        ("nothing", "nothing"),
        ("backup shwo", "shwo"),
        ("backup run", "JOB"),
        ("backup runs --limit many", "must be a whole number"),
        ("backup runs --config /nothing-of-that-name", "cannot be read"),
        ("disk info", "IMAGE"),
        ("disk nothing", "nothing"),
        ("disk info --thraeds /", "there is no option --thraeds"),
        ("disk info --disk vda /", "there is no option --disk"),
        ("disk convert --thraeds 4 / /tmp/target.raw", "did you mean --threads?"),
        ("disk map / --dsik=1", "did you mean --disk?"),
        ("disk map / /", "one word too many"),
        ("disk info /nothing-of-that-name", "does not exist"),
    ],
)
def test_wrong_usage_is_json_where_json_is_asked_for(
    run: Run, capfd: pytest.CaptureFixture[str], line: str, message: str, at: str
) -> None:
    typed = ("--json", *line.split()) if at == "before" else (*line.split(), "--json")
    done = run(*typed)
    out, err = capfd.readouterr()
    assert done.exit_code == 2
    error = json.loads(done.stdout or out)["error"]
    assert error["code"] == ("E_BAK_BAD_REQUEST" if line.startswith("backup") else "E_MIG_BAD_REQUEST")
    for words in (error["detail"], done.stderr + err):
        assert message in words
        assert "Input should" not in words


def test_json_may_stand_before_a_command_of_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = tmp_path / "web.raw"
    image.write_bytes(bytes(4096))
    for arguments in (["--json", "info", str(image)], ["info", "--json", str(image)]):
        assert disk.main(arguments) == 0
        assert json.loads(capsys.readouterr().out)["path"] == str(image)


def test_nothing_is_named_where_nothing_is_like_it(tmp_path: Path) -> None:
    (tmp_path / "web").touch()
    assert did_you_mean("web", ["something else"]) is None
    assert did_you_mean_file(tmp_path / "another") is None
    assert did_you_mean_file(tmp_path / "no folder" / "web") is None
