"""What `zfs allow` says, as zfs 2.1 prints it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from synvirt.destinations.zfs_allow import NEEDED, missing
from synvirt.destinations.zfs_command import ZfsRefused

ALL = ",".join(sorted(NEEDED))
ABOVE = "---- Permissions on tank ---------------------------------------------\n"


def saying(text: str) -> Callable[..., str]:
    return lambda *_: text


def test_nothing_is_allowed_where_zfs_says_nothing() -> None:
    assert missing("tank/synvirt", "synvirt", frozenset(), saying("")) == sorted(NEEDED)


@pytest.mark.parametrize(
    "text",
    [
        f"{ABOVE}Local+Descendent permissions:\n\tuser synvirt {ALL}\n",
        f"{ABOVE}Local+Descendent permissions:\n\tgroup kvm {ALL}\n",
        f"{ABOVE}Local+Descendent permissions:\n\teveryone {ALL}\n",
        f"{ABOVE}Permission sets:\n\t@a @b\n\t@b {ALL}\nLocal+Descendent permissions:\n\tuser synvirt @a\n",
        f"{ABOVE}Local+Descendent permissions:\n\tuser synvirt create\n\tuser synvirt {ALL}\n",
    ],
)
def test_it_is_allowed_to_the_user_a_group_or_everyone_by_name_or_by_set(text: str) -> None:
    assert missing("tank/synvirt", "synvirt", frozenset({"kvm"}), saying(text)) == []


@pytest.mark.parametrize(
    "text",
    [
        f"{ABOVE}Local permissions:\n\tuser synvirt {ALL}\n",
        f"{ABOVE}Create time permissions:\n\t{ALL}\n",
        f"{ABOVE}Local+Descendent permissions:\n\tuser other {ALL}\n\tgroup synvirt {ALL}\n",
        f"{ABOVE}Permission sets:\n\t@a @a,@none\nLocal+Descendent permissions:\n\tuser synvirt @a\n",
    ],
)
def test_what_is_allowed_to_others_or_not_below_does_not_count(text: str) -> None:
    assert missing("tank/synvirt", "synvirt", frozenset({"kvm"}), saying(text)) == sorted(NEEDED)


def test_the_nearest_dataset_that_is_there_decides() -> None:
    def zfs(_: str, dataset: str) -> str:
        if dataset != "tank":
            raise ZfsRefused(f"zfs: cannot open '{dataset}': dataset does not exist", "missing", None)
        return f"{ABOVE}Local+Descendent permissions:\n\tuser synvirt {ALL}\n"

    assert missing("tank/vms/synvirt", "synvirt", frozenset(), zfs) == []
    with pytest.raises(ZfsRefused):
        missing("other/synvirt", "synvirt", frozenset(), zfs)


def test_the_documented_line_allows_what_is_needed() -> None:
    text = (Path(__file__).parents[2] / "docs/zfs.md").read_text()
    line = next(line.split() for line in text.splitlines() if line.strip().startswith("zfs allow -u"))
    assert set(line[4].split(",")) == NEEDED
