"""One rule for the name that was probably meant, wherever a name is looked for."""

import ast
from pathlib import Path

import synvirt
from synvirt.nearest import did_you_mean, listed

ROOT = Path(synvirt.__file__).parent
# It lists several names of VMs, and names none that was meant.
LISTS = {"fleet/querying.py"}


def test_no_module_has_a_limit_of_its_own() -> None:
    found = {
        str(path.relative_to(ROOT))
        for path in ROOT.rglob("*.py")
        if "difflib" in (text := path.read_text())
        and any(isinstance(node, ast.Attribute) and node.attr == "get_close_matches" for node in ast.walk(ast.parse(text)))
    }
    assert found == {"nearest.py"} | LISTS


def test_what_is_half_alike_is_not_meant() -> None:
    assert did_you_mean("night", ["eight", "daily"]) == "did you mean eight?"
    assert did_you_mean("nite", ["niteroi-weekend"]) is None


def test_a_hint_lists_the_names_that_there_are() -> None:
    """«There is no concern called x; there is none» was one line of the command line."""
    assert listed([]) is None
    assert (
        listed([f"disk{n:02}" for n in range(21)]) == "there is " + ", ".join(f"disk{n:02}" for n in range(20)) + ", and 1 more"
    )
