"""Folders and files in which one finds one's way: none too large, which are split by subject, and no imports in a circle."""

from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[2]

FILES_MAX = 25
LINES_MAX = 500


def _modules(part: str) -> list[Path]:
    return [path for path in (ROOT / part).rglob("*.py") if "__pycache__" not in path.parts]


@pytest.mark.parametrize("part", ["src", "tests", "bench"])
def test_no_folder_has_more_than_25_modules(part: str) -> None:
    modules = _modules(part)
    assert modules, f"{part} has no modules: it was moved"
    rooms = {path.parent for path in modules}
    large = {str(room.relative_to(ROOT)): len(list(room.glob("*.py"))) for room in rooms}
    assert {room: count for room, count in large.items() if count > FILES_MAX} == {}


@pytest.mark.parametrize("part", ["src", "tests", "bench"])
def test_no_module_has_more_than_500_lines(part: str) -> None:
    large = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in _modules(part)}
    assert {path: lines for path, lines in large.items() if lines > LINES_MAX} == {}


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Also by imports within functions. import-linter holds the order of the rooms; this is about what is inside of them."""
    graph = grimp.build_graph("synvirt", exclude_type_checking_imports=True, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    TopologicalSorter(imports).prepare()  # CycleError names the modules
