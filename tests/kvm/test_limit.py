"""Calls that never return hold no more than a thread for each thing that is asked."""

import threading
import time

import pytest

from synvirt.kvm.limit import Single


def test_a_call_that_hangs_is_made_once() -> None:
    answers, calls = threading.Event(), []

    def hangs() -> int:
        calls.append(threading.current_thread())
        answers.wait(60)
        return len(calls)

    single = Single(hangs)
    for _ in range(20):
        with pytest.raises(TimeoutError):
            single.within(0.01)
    assert len(calls) == 1
    answers.set()
    assert single.within(60) in (1, 2)


def test_who_asks_meanwhile_waits_as_long_as_the_first() -> None:
    """A busy machine's answer takes a second: that is no silence."""

    def slow() -> int:
        time.sleep(0.6)
        return 7

    single = Single(slow)
    found: list[int] = []
    first = threading.Thread(target=lambda: found.append(single.within(60)))
    first.start()
    time.sleep(0.05)
    assert single.within(60) == 7
    first.join()
    assert found == [7]


def test_each_call_after_the_first_has_an_answer_of_its_own() -> None:
    answers = iter((1, 2))
    single = Single(lambda: next(answers))
    assert [single.within(60), single.within(60)] == [1, 2]

    def refuse() -> int:
        raise OSError("no such device")

    with pytest.raises(OSError, match="no such device"):
        Single(refuse).within(60)
