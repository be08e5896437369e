"""A folder or a file that has grown too large to find one's way in is split by subject."""

from pathlib import Path

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
