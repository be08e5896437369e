"""Ids of members, made from the names of their VMs."""

import time

from synvirt.fleet.member_ids import MemberIds, ids
from synvirt.fleet.model import MEMBERS_MAX


def test_names_that_are_alike_get_numbers_that_nobody_has() -> None:
    made = MemberIds()
    made.take("web-2")
    assert [made.fresh("web") for _ in range(3)] == ["web", "web-3", "web-4"]
    assert (made.fresh("web-3"), made.fresh("a" * 255), made.fresh("a" * 100)) == ("web-3-2", "a" * 58, "a" * 58 + "-2")


def test_the_largest_wave_named_in_letters_that_no_id_has_gets_its_ids_at_once() -> None:
    began = time.thread_time()
    made = ids(f"{number}号".translate(str.maketrans("0123456789", "〇一二三四五六七八九")) for number in range(MEMBERS_MAX))
    assert time.thread_time() - began < 2
    assert (len(set(made)), made[0], made[-1]) == (MEMBERS_MAX, "vm", f"vm-{MEMBERS_MAX}")
