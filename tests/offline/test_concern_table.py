"""The page for users lists the concerns that there are, and says of them what the code says."""

from collections import Counter
from pathlib import Path

from tests.offline import concern_table

PAGE = Path(__file__).parents[2] / "docs/importing-files.md"


def test_the_page_has_the_codes_own_table() -> None:
    """Otherwise: `python -m tests.offline.concern_table` prints it."""
    table = [line for line in PAGE.read_text().splitlines() if line.startswith("| `") and line.count("|") == 5]
    assert table == concern_table.rows()[2:]


def test_no_two_concerns_share_an_id() -> None:
    ids = Counter(concern.id for concern in concern_table.made())
    assert ids.most_common(1)[0][1] == 1
    assert len(ids) > 25


def test_a_plan_knows_which_concerns_are_of_a_disk() -> None:
    """`disk-…:KEY`: a disk that is skipped takes them along (migrations/planning/critical.py)."""
    for concern in concern_table.made():
        assert concern.id.startswith("disk-") == concern.id.endswith(":KEY")
