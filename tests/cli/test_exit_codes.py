"""0 done, 1 failed or refused, 2 wrong usage: across the commands."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import typer
from rich.cells import cell_len
from rich.console import Console

import synvirt
from synvirt.cli import listing
from synvirt.doctor import Missing
from synvirt.doctor.service import temporary_files
from synvirt.settings import Settings
from tests.cli.conftest import Run
from tests.fakes.service import Service

NOBODY = str(UUID(int=0x7E57))
DONE = [
    "migrations list",
    "sources list",
    "uploads list",
    "destinations",
    "--json migrations list",
    "--version",
    "migrations watch",
]
REFUSED = [
    f"migrations show {NOBODY}",
    f"migrations watch {NOBODY}",
    f"migrations cancel {NOBODY}",
    f"migrations cutover {NOBODY}",
    f"migrations retry {NOBODY}",
    f"sources show {NOBODY}",
    "sources test nobody",
    "sources vms nobody",
    f"uploads show {NOBODY}",
    f"uploads remove {NOBODY}",
]
WRONG = [
    "migrations",
    "migrations show",
    "migrations nonsense",
    "migrations list --limit nine",
    "sources add",
    "sources test",
    "uploads show",
    "inspect",
    "import",
    "completion",
    "completion tcsh",
    "support-bundle a b",
    "doctor --nonsense",
    "disk info /nonexistent.qcow2",
    "--nonsense",
]


@pytest.mark.parametrize(
    ("line", "code"), [*((line, 0) for line in DONE), *((line, 1) for line in REFUSED), *((line, 2) for line in WRONG)]
)
def test_exit_code(service: Service, run: Run, line: str, code: int) -> None:
    done = run(*line.split())
    assert done.exit_code == code, done.output
    if code == 1:
        assert done.stderr.startswith("E_"), done.stderr
    assert "Traceback" not in done.output


@pytest.mark.parametrize("line", ["backup run nothing", "backup show-job nothing", "backup show-point nothing"])
def test_what_backups_do_not_have_has_a_code_of_theirs(service: Service, run: Run, line: str) -> None:
    done = run(*line.split())
    assert (done.exit_code, done.stderr.partition(":")[0]) == (1, "E_BAK_NOT_FOUND")


def test_a_table_fits_a_terminal_of_80_columns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The beginning of an id is enough for every command, so that is what a narrow terminal shows."""
    id_ = str(UUID(int=0x7E57))
    row = (
        id_,
        "a guest of a long name indeed, of a department",
        "CopyingFull",
        "123 GiB of 568 GiB",
        "2026-01-02 03:04:05",
    )
    monkeypatch.setattr(Console, "is_terminal", True)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    listing.print_table(("ID", "NAME", "STATE", "DONE", "CREATED"), [row])
    lines = [re.sub(r"\x1b\[\d+m", "", line) for line in capsys.readouterr().out.splitlines()]
    assert max(map(len, lines)) <= 80
    assert lines[1].startswith(f"{id_[:8]} ")
    assert "123 GiB of 568 GiB" in lines[1]
    assert "2026-01-02 03:04:05" in lines[1]
    monkeypatch.setenv("COLUMNS", "200")
    listing.print_table(("ID", "NAME", "STATE", "DONE", "CREATED"), [row])
    assert id_ in capsys.readouterr().out, "there is room for all of it"


def test_a_long_sentence_of_a_table_cuts_no_other_column(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    titles, why = ("MEMBER", "STATE", "JOB", "TO", "WHY"), "its file is damaged " * 20
    rows = [("web01", "cutting_over", "1f3a5b7c", "", ""), ("web02", "failed", "2b4c6d8e", "", why)]
    listing.print_table(titles, rows)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3, "elsewhere than in a terminal, a row is a line"
    assert why.strip() in lines[2]
    monkeypatch.setattr(Console, "is_terminal", True)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    listing.print_table(titles, rows)
    out = re.sub(r"\x1b\[\d+m", "", capsys.readouterr().out)
    assert max(map(len, out.splitlines())) <= 80
    assert {"cutting_over", "1f3a5b7c", "failed", "2b4c6d8e"} <= set(out.split())
    assert out.count("damaged") == 20


@pytest.mark.parametrize("columns", [80, 60, 40, 20, 1])
def test_a_terminal_too_narrow_for_a_table_cuts_none_of_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: int
) -> None:
    """Ids of two characters and times without their end were of no use, and names went altogether."""
    titles = ("ID", "NAME", "ROLE", "MADE BY", "EXPIRES", "LAST USED")
    row = (str(UUID(int=0x7E57)), "a-token-of-long-name", "operator", "local", "2027-02-28 14:46:45", "2026-11-30 14:48:33")
    monkeypatch.setattr(Console, "is_terminal", True)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(columns))
    listing.print_table(titles, [row])
    head, first, *more = [re.sub(r"\x1b\[\d+m", "", line) for line in capsys.readouterr().out.splitlines()]
    assert re.split(r"  +", head.strip()) == list(titles)
    id_, name, *rest = re.split(r"  +", first.strip())
    assert (id_, tuple(rest)) == (row[0][:8], row[2:])
    assert "".join([name, *(line.strip() for line in more)]) == row[1]


@pytest.mark.parametrize("columns", [200, 40])
def test_a_table_shows_names_as_they_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: int
) -> None:
    """Whether something must wrap or not: codes of emojis and styles mean nothing here, and wide characters are two columns."""
    monkeypatch.setattr(Console, "is_terminal", True)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(columns))
    names = ("web:cat:", "[bold]db[/]", "\N{CJK UNIFIED IDEOGRAPH-6F22}\N{CJK UNIFIED IDEOGRAPH-5B57}")
    listing.print_table(("NAME", "WHY"), [(name, "! it waits" + " for its turn" * 4) for name in names])
    lines = [re.sub(r"\x1b\[\d+m", "", line) for line in capsys.readouterr().out.splitlines()]
    assert (len(lines) == 1 + len(names)) is (columns == 200)
    assert [(line.split()[0], cell_len(line.partition("!")[0])) for line in lines if "!" in line] == [
        (name, 13) for name in names
    ]


def test_every_command_shows_an_example_of_itself() -> None:
    from synvirt.main import app

    def lacking(command: Any, names: list[str]) -> list[str]:
        if getattr(command, "commands", None):
            return [name for inner, held in command.commands.items() for name in lacking(held, [*names, inner])]
        return [] if re.search("Examples?: synvirt ", command.help or "") else [" ".join(names)]

    assert lacking(typer.main.get_command(app), []) == []


@pytest.mark.parametrize(
    "line", ["hosts fence kvm2", "migrations take-over 1f3a", "waves cancel november", "waves roll-back november"]
)
def test_who_wants_json_is_asked_nothing_and_who_does_not_answer_is_refused(service: Service, run: Run, line: str) -> None:
    """A question would stand among the JSON, and nobody reads it there."""
    done = run(*line.split(), "--json")
    assert (done.exit_code, json.loads(done.stdout)["error"]["hint"]) == (2, "confirm with --yes")
    unanswered = run(*line.split(), typed="")
    assert (unanswered.exit_code, "confirm with --yes" in unanswered.stderr) == (2, True)
    done = run(*line.split(), typed="n\n")
    # The runner itself shows what is typed.
    assert (done.exit_code, "[y/N]" in done.stdout, "[y/N]" in done.stderr) == (1, False, True)


def test_every_question_is_asked_so() -> None:
    files = [path for path in (Path(synvirt.__file__).parent / "cli").rglob("*.py") if "typer.confirm" in path.read_text()]
    assert [path.name for path in files] == ["options.py"]


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("--help", 1),
        ("completion bash", 1),
        ("--json config show", 1),
        ("disk info {image}", 1),
        ("disk info --json {image}", 1),
    ],
)
def test_an_output_that_takes_nothing_is_reported(tmp_path: Path, line: str, code: int) -> None:
    """`>/dev/full`: a disk without space."""
    (tmp_path / "disk.raw").write_bytes(bytes(512))
    argv = [sys.executable, "-m", "synvirt", *line.format(image=tmp_path / "disk.raw").split()]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            argv, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False, env=alone(tmp_path)
        )
    assert done.returncode == code
    assert done.stderr.startswith("E_MIG_DISK_WRITE_FAILED: the standard output cannot be written: No space left on device\n")
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.parametrize(
    "line", ["--json config show", "--json nothing", "--json migrations list", "disk info --json /nothing"]
)
def test_an_unbuffered_output_that_takes_nothing_is_no_traceback(tmp_path: Path, line: str) -> None:
    """Images of containers set PYTHONUNBUFFERED: then each print is refused by itself, also that of the error as JSON."""
    argv, unbuffered = [sys.executable, "-m", "synvirt", *line.split()], {"PYTHONUNBUFFERED": "1"}
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            argv, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False, env=alone(tmp_path) | unbuffered
        )
    assert done.returncode in (1, 2)
    assert done.stderr.strip()
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_command_whose_streams_are_closed_does_its_work(tmp_path: Path, closed: str) -> None:
    """What it opens then must not get their numbers."""
    (tmp_path / "disk.raw").write_bytes(bytes(range(256)) * 4096)
    shell = f'"$1" -m synvirt disk convert "$2/disk.raw" "$2/made.raw" {closed}'
    done = subprocess.run(
        ["sh", "-c", shell, "sh", sys.executable, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=alone(tmp_path),
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "made.raw").read_bytes() == bytes(range(256)) * 4096


def alone(folder: Path) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(sys.path), "SYNVIRT_DATA_DIR": str(folder / "data")}


def test_a_host_without_room_for_temporary_files_is_said(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk that has /tmp and /var/tmp. Before, it was unexpected, to be reported, and a service did not start by it."""
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("tempfile._candidate_tempdir_list", lambda: ["/nonexistent/tmp"])
    done = run("serve", "--data-dir", str(tmp_path / "data"), "--listen", "127.0.0.1:0")
    assert done.exit_code == 1
    assert "E_MIG_DISK_WRITE_FAILED: a temporary file cannot be written" in done.stderr
    assert "/nonexistent/tmp" in done.stderr
    with pytest.raises(Missing, match="a temporary file cannot be made"):
        temporary_files(Settings(data_dir=tmp_path))
