"""Tables that name tests: subject ─▶ file below tests/, and the names of its tests."""

import ast
from collections.abc import Mapping
from pathlib import Path

FOLDER = Path(__file__).parent.parent

Tests = Mapping[str, Mapping[str, tuple[str, ...]]]


def missing(tests: Tests) -> list[str]:
    """What the table names and no file has, as `file::name`."""
    gone = []
    for files in tests.values():
        for file, names in files.items():
            path = FOLDER / file
            tree = ast.parse(path.read_text() if path.exists() else "")
            there = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
            gone += [f"{file}::{name}" for name in names if name not in there]
    return gone
