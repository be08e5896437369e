"""What a command says of one thing: a sheet of names and values."""

import re
from pathlib import Path

import pytest

from synvirt import cli
from synvirt.cli.program import sheet, shown


@pytest.mark.parametrize("rows", [[], [("id", "1")], [("id", "1"), ("created_at", "")], [("id", "a\x1bb")]])
def test_the_values_of_a_sheet_stand_below_each_other(rows: list[tuple[str, str]]) -> None:
    lines = sheet(rows)
    width = max((len(name) for name, _ in rows), default=0)
    assert [line[:width].rstrip() for line in lines] == [name for name, _ in rows]
    assert [line[width + 1 :] for line in lines] == [shown(value) for _, value in rows]


def test_no_command_has_a_sheet_of_its_own() -> None:
    """Each had a width of its own, and two were too narrow for their names."""
    own = re.compile(r'print\(f"\{name:\d+\} ')
    assert [path.name for path in Path(cli.__file__).parent.rglob("*.py") if own.search(path.read_text())] == []
