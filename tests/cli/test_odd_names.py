"""Files with names that nobody expects: the longest, of two lines, of bytes that are no text."""

import json
import os
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.fakes.service import Service
from tests.fleet.made import member, wave
from tests.offline import appliances

MIB = 1 << 20
# 255 bytes, in fewer characters.
LONGEST = "ü" * 124 + "v.qcow2"
ODD = (LONGEST, "two\nlines.qcow2", "tab\there.qcow2", "-rf.qcow2", "'quoted' $(id).qcow2", " spaces .qcow2", "\u202egnp.qcow2")


@pytest.fixture
def image(tmp_path: Path) -> Path:
    return appliances.image(tmp_path, "image.qcow2", "qcow2", bytes(MIB))


@pytest.mark.parametrize("name", ODD, ids=ascii)
def test_a_file_of_any_name_is_looked_at_and_imported_and_its_job_has_a_name_of_one_line(
    service: Service, run: Run, image: Path, name: str
) -> None:
    assert len(os.fsencode(LONGEST)) == 255
    image.rename(service.settings.imports_dir / name)
    assert run("inspect", "--", name).exit_code == 0
    done = run("import", "--json", "--", name)
    assert done.exit_code == 0, done.stderr
    shown = json.loads(done.stdout)["name"]
    assert shown.isprintable()
    assert shown == " ".join("".join(each if each.isprintable() else " " for each in name).split())
    listed = run("migrations", "list").stdout.splitlines()
    assert len(listed) == 2
    assert run("migrations", "show", "--", shown).exit_code == 0


def test_a_name_of_two_lines_is_one_row_in_a_table(service: Service, run: Run, image: Path) -> None:
    image.rename(service.settings.imports_dir / "one.qcow2\nqcow2  of another row.qcow2")
    assert len(run("files").stdout.splitlines()) == 2


# Starts a control sequence by one character, as ESC and [ do; and turns the order of what follows.
CONTROLS = "\x9b2J\u202egnp"


def test_nothing_that_is_printed_controls_a_terminal(service: Service, run: Run) -> None:
    """Nor an answer that is printed as it came; a script still reads the same names."""
    made = service.waves.create(wave(member("shop")).model_copy(update={"name": f"night{CONTROLS}"}))
    commands = (("list",), ("show", made.id), ("members", made.id), ("export", made.id), ("go", made.id))
    for command in commands:
        for options in ((), ("--json",)):
            done = run("waves", *command, *options)
            assert done.exit_code == 0, done.stderr
            assert not set(CONTROLS) & {one for one in done.stdout + done.stderr if not one.isprintable()}, command
    assert json.loads(run("waves", "list", "--json").stdout)["items"][0]["name"] == made.name
    assert made.name.endswith(CONTROLS)


@pytest.mark.parametrize("command", ["import", "inspect", "files"])
def test_a_name_that_is_no_text_is_refused_with_what_to_do(service: Service, run: Run, image: Path, command: str) -> None:
    name = os.fsdecode(b"\xff\xfe.qcow2")
    image.rename(service.settings.imports_dir / name)
    refused = run(command, name)
    assert refused.exit_code == 2
    assert "a file's name is not UTF-8" in refused.stderr


def test_a_job_whose_removal_was_interrupted_is_not_said_to_go_on(service: Service, run: Run) -> None:
    """Its own id is where a job's is that has taken it over."""
    job = service.submit()
    service.store.change(job.id, job.state, lambda one: one.model_copy(update={"retried_by": one.id}))
    reported = run("migrations", "show", job.id).stdout
    assert "if that was interrupted, remove it again" in reported
    assert "goes on with its copy" not in reported
