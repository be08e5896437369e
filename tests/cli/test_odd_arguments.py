"""What nobody means to type: names that are too long, nests of brackets, texts that are no numbers. All of it is a mistake of
the caller, and is named as such."""

import json
import os
import subprocess
import sys
from pathlib import Path
from uuid import UUID

import pytest

from synvirt.cli.listing import segment
from synvirt.errors import BadRequest, Internal
from tests.cli.conftest import Run
from tests.fakes.service import Service
from tests.fleet.made import member, wave
from tests.offline import appliances

NOBODY = str(UUID(int=0x7E57))
LONG = "x" * 300
MIB = 1 << 20


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made = tmp_path / "here"
    (made / "folder").mkdir(parents=True)
    (made / "deep").write_text("[" * 100_000)
    (made / "deep.toml").write_text("a = " + "[" * 100_000)
    (made / "image.raw").write_bytes(bytes(MIB))
    monkeypatch.chdir(made)
    return made


@pytest.mark.parametrize(
    "line",
    [
        f"support-bundle {LONG}",
        f"support-bundle image.raw/{LONG}",
        f"receipt verify {LONG}",
        f"receipt verify folder --chain {LONG}",
        f"import {LONG} --upload",
        f"disk convert image.raw {LONG}",
        "migrations submit deep",
        "migrations dry-run deep",
        f"waves replace {NOBODY} deep",
        f"waves simulate {NOBODY} --what-if deep",
        "inspect https://files.example/web.ova --credentials deep.toml",
        "doctor --config deep.toml",
        f"rehearse {NOBODY} --check don't",
        f"rehearse {NOBODY} --within nan",
        "tokens create prometheus --days inf",
    ],
    ids=lambda line: line.replace(LONG, "LONG")[:40],
)
def test_it_is_wrong_usage_and_no_error_of_ours(service: Service, run: Run, folder: Path, line: str) -> None:
    done = run("--json", *line.split())
    assert done.exit_code == 2, done.output
    assert json.loads(done.stdout.splitlines()[-1])["error"]["code"] == BadRequest.code


@pytest.mark.parametrize("name", ["..", "two\nlines", "a/b?c#d", "\N{GRINNING FACE}", ""])
def test_a_name_stays_in_its_place_of_a_path(service: Service, run: Run, name: str) -> None:
    made = service.waves.create(wave(member("shop")))
    for line in (("waves", "member"), ("waves", "skip")):
        done = run(*line, made.id, name)
        assert done.exit_code in (1, 2)
        assert Internal.code not in done.stderr
        assert "no path" not in done.stderr
    assert [one.state for one in service.waves.whole(made.id).members] == ["waiting"]


def test_two_dots_lead_nowhere() -> None:
    assert [segment(name) for name in ("web 01", ".", "..", "...", "a/../b")] == [
        "web%2001",
        "%2E",
        "%2E%2E",
        "...",
        "a%2F..%2Fb",
    ]


@pytest.mark.parametrize("line", ["disk info", "disk map", "disk compare --strict"])
def test_a_file_among_too_many_does_not_control_the_terminal(
    run: Run, folder: Path, capfd: pytest.CaptureFixture[str], line: str
) -> None:
    """A shell's * gives the names of all files, and names come from hostile archives."""
    name = "red\x1b[31m.qcow2"
    Path(name).touch()
    done = run(*line.split(), "image.raw", name)
    out, err = capfd.readouterr()
    assert done.exit_code == 2
    assert "red\N{REPLACEMENT CHARACTER}[31m.qcow2" in done.output + out + err
    assert "\x1b" not in done.output + out + err


def test_a_named_pipe_is_no_log(service: Service, run: Run, folder: Path) -> None:
    """Nobody may ever write to it."""
    os.mkfifo("pipe.log")
    assert run("support-bundle", "help.tar.gz", "--log", "pipe.log").exit_code == 0


def test_a_terminal_of_another_encoding_shows_what_it_can(tmp_path: Path) -> None:
    name = "wéb \N{GRINNING FACE}.qcow2"
    appliances.image(tmp_path, "image.qcow2", "qcow2", bytes(MIB)).rename(tmp_path / name)

    def run(*arguments: str) -> bytes:
        argv = [sys.executable, "-m", "synvirt", *arguments, name]
        environment = os.environ | {"PYTHONIOENCODING": "latin-1"}
        return subprocess.run(argv, cwd=tmp_path, env=environment, check=True, capture_output=True, timeout=120).stdout

    assert "wéb ?.qcow2" in run("disk", "info").decode("latin-1")
    assert json.loads(run("disk", "info", "--json"))["path"] == name


WHOLE = "y" * 10_000


def test_a_value_that_nobody_reads_is_not_repeated_whole(
    service: Service, run: Run, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for line in (
        f"migrations show {WHOLE}",
        f"import {WHOLE}",
        f"import web.ova --kind {WHOLE}",
        f"import web.ova --memory {WHOLE}",
        f"migrations list --{WHOLE}",
        f"migrations list --server {WHOLE}",
        f"migrations list --data-dir {WHOLE}",
        f"migrations take-over {WHOLE}",
        f"password {WHOLE}",
        f"disk info {WHOLE}",
        f"disk info image.raw --{WHOLE}",
        f"disk info image.raw {WHOLE}",
        f"support-bundle --log {WHOLE}",
        WHOLE,
    ):
        done = run(*line.split())
        out, err = capfd.readouterr()
        shown = done.output + out + err
        assert "yyy" in shown, line.replace(WHOLE, "WHOLE")
        assert len(shown) < 2500, line.replace(WHOLE, "WHOLE")


def test_a_window_whose_times_have_passed_is_said_to_stay_shut(service: Service, run: Run) -> None:
    def times(year: int) -> tuple[str, ...]:
        return "--start", f"{year}-01-01T00:00:00", "--end", f"{year}-01-01T01:00:00"

    shut = "It does not open any more: its times have passed"
    assert shut in run("windows", "add", "night", *times(2020)).stdout
    assert shut not in run("windows", "change", "night", *times(2999)).stdout
    assert shut in run("windows", "change", "night", *times(2021)).stdout
