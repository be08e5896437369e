"""What the product defines it uses. Code that only tests use, or nothing, is not the product's."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

SOURCES = Path(__file__).parents[2] / "src/synvirt"
# Python itself calls them.
CALLED = {"__getattr__"}


def _defined(module: ast.Module) -> Iterator[str]:
    """The names of a module; a function with a decorator is used by that, as a route or a command."""
    for node in module.body:
        if isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.decorator_list:
            yield node.name


def test_every_name_of_a_module_is_used_somewhere() -> None:
    modules = [path for path in SOURCES.rglob("*.py") if "versions" not in path.parts]
    words = Counter(word for path in [*modules, *SOURCES.rglob("*.html")] for word in re.findall(r"\w+", path.read_text()))
    unused = {
        f"{path.relative_to(SOURCES)}: {name}"
        for path in modules
        for name in _defined(ast.parse(path.read_text()))
        if words[name] == 1 and name not in CALLED
    }
    assert unused == set()
