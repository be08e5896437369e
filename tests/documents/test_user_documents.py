"""What users read is so: documents made from the code are the code's, and the commands that they show work."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from synvirt.cli.disk import parsing as disk
from synvirt.errors import BY_CODE
from synvirt.main import app
from tests.documents import made as documents
from tests.needs import need
from tests.running import forked

ROOT = documents.DOCS.parent
SOURCES = sorted((ROOT / "src").rglob("*.py"))
AGAIN = "run: .venv/bin/python -m tests.documents"


def test_troubleshooting_is_what_errors_py_says() -> None:
    assert (documents.DOCS / "troubleshooting.md").read_text() == documents.troubleshooting(), AGAIN


def test_each_code_says_where_to_look_first() -> None:
    """Those of errors, and those that a run only warns with."""
    codes = {code for file in SOURCES for code in re.findall(r"\bE_(?:MIG|BAK)_[A-Z0-9_]+\b", file.read_text())}
    assert documents.WARNINGS.keys() == codes - BY_CODE.keys()
    assert documents.FIRST.keys() == codes | BY_CODE.keys()


def test_the_api_reference_is_what_the_service_serves() -> None:
    document = documents.openapi()
    written = (documents.DOCS / "api.md").read_text()
    assert written == documents.api(document), AGAIN
    assert [path for path in document["paths"] if f"## `{path}`" not in written] == []


def test_the_guide_says_of_all_in_the_data_folder_whether_to_back_it_up() -> None:
    named = {name for file in SOURCES for name in re.findall(r'\bdata_dir / "([\w.]+)"', file.read_text())}
    table = (documents.DOCS / "operating.md").read_text().partition("## Back up the data folder")[2].partition("```")[0]
    assert len(named) > 10
    assert {name for name in named if f"`{name}`" not in table and f"`{name}/`" not in table} == set()


def _blocks() -> list[tuple[str, str]]:
    return [
        (page.name, block)
        for page in sorted([*documents.DOCS.glob("*.md"), ROOT / "README.md"])
        for block in re.findall(r"^```sh\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    ]


def _shown() -> list[str]:
    """Commands of ours, in the guides' blocks and in what is indented elsewhere; without what a shell does with them."""
    found = set()
    for page in sorted([*documents.DOCS.glob("**/*.md"), ROOT / "README.md"]):
        for line in re.findall(r"^(?:    )?(?:\.venv/bin/)?(synvirt .*)$", page.read_text(), re.MULTILINE):
            found.add(re.split(r"\s+#|\s+\|\||\s+>|\s+&&|\s+\|", line)[0].strip())
    return sorted(found - {"synvirt --version"})


@pytest.mark.parametrize("line", _shown())
def test_every_command_that_is_shown_is_one(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its commands, options and values are taken by the program, which is not run."""
    monkeypatch.setattr(disk, "_existing", Path)
    _taken(shlex.split(line)[1:])


def _taken(words: list[str]) -> None:
    """ClickException or AssertionError, if the program does not take them."""
    if words[0] == "disk":  # these have a parser of their own, which looks whether the image is there
        assert disk.parser_of([]).parse_args([word for word in words[1:] if word != "--json"])
        return
    command: Any = typer.main.get_command(app)
    name = "synvirt"
    parent = None
    while True:
        parent = command.make_context(name, list(words), parent=parent)
        rest = [*parent._protected_args, *parent.args] if hasattr(parent, "_protected_args") else parent.args
        if not hasattr(command, "commands") or not rest:
            break
        name, *words = rest
        command = command.get_command(parent, name)
        assert command is not None, f"there is no command {name}"


def test_every_command_that_is_named_is_one() -> None:
    """Within a line, by its name alone: `synvirt sources test NAME`."""
    root: Any = typer.main.get_command(app)
    wrong = []
    for page in sorted([*documents.DOCS.glob("**/*.md"), ROOT / "README.md"]):
        for group, name in re.findall(r"`synvirt ([a-z][a-z-]+)(?: ([a-z][a-z-]+)\b)?", page.read_text()):
            if (group, name) == ("restore", "point"):  # the first line of what is signed: docs/backup-format.md
                continue
            command = root.commands.get(group)
            inner = getattr(command, "commands", None)
            if command is None or (inner and name and name not in inner):
                wrong.append(f"{page.name}: synvirt {group} {name}")
    assert wrong == []


def _named() -> list[tuple[str, str]]:
    """Commands with arguments within a line. A name alone stands for what is said of the command; what a person chooses is
    in brackets, or left out."""
    found = set()
    for page in sorted([*documents.DOCS.glob("**/*.md"), ROOT / "README.md"]):
        for line in re.findall(r"`(synvirt [a-z][^`]*)`", page.read_text()):
            words = re.split(r"\s+#|\s+>|\s+&&", line)[0].split()
            if any(word.isupper() for word in words) and not re.search("[][|…]", line):
                found.add((page.name, " ".join(words)))
    return sorted(found - {("operating.md", "synvirt audit export --after NUMBER")})  # a number, which NUMBER is not


@pytest.mark.parametrize(("page", "line"), _named())
def test_every_command_that_is_named_with_arguments_has_all_that_it_needs(
    page: str, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "_existing", Path)
    _taken(shlex.split(line)[1:])


RUN = [(page, block) for page, block in _blocks() if block.startswith("# test: runs\n")]


@pytest.mark.parametrize(("page", "block"), RUN, ids=[f"{page}-{number}" for number, (page, _) in enumerate(RUN)])
def test_the_commands_of_marked_blocks_run(page: str, block: str, tmp_path: Path) -> None:
    """As a user would paste them, with a data folder of the test's own and no service."""
    need("qemu-img", "qemu-utils")
    # What this machine lacks, the doctor says with 1: that is no mistake of the document's.
    block = re.sub(r"^synvirt doctor\b.*$", "synvirt doctor || [ $? = 1 ]", block, flags=re.MULTILINE)
    done = forked.in_shell(block, tmp_path, timeout=100, SYNVIRT_DATA_DIR=str(tmp_path / "data"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout or len(list(tmp_path.iterdir())) > 2


def test_the_guides_have_blocks_that_run() -> None:
    assert {page for page, _ in RUN} >= {"quick-start.md", "operating.md"}
