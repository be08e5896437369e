"""A message that a person sees has the name or the folder itself, not a placeholder for it."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

SOURCES = Path(__file__).parents[2] / "src/synvirt"
PLACEHOLDER = re.compile(r"\{[a-z_]+\}")
# Keywords of calls whose texts are shown.
SHOWN = {"hint", "detail", "help"}


def _texts(node: ast.AST) -> Iterator[tuple[int, str]]:
    for one in ast.walk(node):
        if isinstance(one, ast.Constant) and isinstance(one.value, str):
            yield one.lineno, one.value


def _shown(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise):
            yield from _texts(node)
        elif isinstance(node, ast.keyword) and node.arg in SHOWN:
            yield from _texts(node.value)
        elif isinstance(node, ast.Assign) and _is_a_hint(node) and not _is_filled(tree):
            yield from _texts(node)


def _is_a_hint(node: ast.Assign) -> bool:
    return any(isinstance(to, ast.Name) and "hint" in to.id.lower() for to in node.targets)


def _is_filled(tree: ast.Module) -> bool:
    """Whether the module fills the placeholders of its hints."""
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    return any(isinstance(func, ast.Attribute) and func.attr == "format" for func in calls)


def test_no_message_has_a_placeholder() -> None:
    found = {
        f"{path.relative_to(SOURCES)}:{line}: {text}"
        for path in SOURCES.rglob("*.py")
        for line, text in _shown(ast.parse(path.read_text()))
        if PLACEHOLDER.search(text)
    }
    assert found == set()
