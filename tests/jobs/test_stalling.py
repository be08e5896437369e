"""When a worker is stalled: the clock is the test's."""

import pytest

from synvirt.http_answers import LEAST_BPS
from synvirt.jobs.stalling import Stall
from synvirt.jobs.wire import Flushed, Moved, Result, Watched

AFTER_S = 10.0
# What a window must bring. The figures below are numbers of these.
ENOUGH = int(LEAST_BPS * AFTER_S)
Message = Moved | Flushed | Result
ASKS = Result(name="wanted_rate", content={}, waits=True)
TELLS = Result(name="stored", content={})


def moved(done: float, total: float = 100) -> Moved:
    return Moved(key="a", bytes_total=int(total * ENOUGH), bytes_done=int(done * ENOUGH), bytes_zero=0)


def flushed(offset: int, *, finished: bool = False) -> Flushed:
    done = offset * ENOUGH
    return Flushed(key="a", offset_bytes=done, bytes_total=100 * ENOUGH, bytes_done=done, bytes_zero=0, finished=finished)


class Watch:
    def __init__(self, watched: Watched, after_s: float | None = AFTER_S) -> None:
        self.now_s = 0.0
        self.stall = Stall(watched, after_s, lambda: self.now_s)

    def after(self, seconds: float, *messages: Message) -> bool:
        """Each message comes after `seconds`. Whether the worker counts as stalled by then."""
        for message in messages:
            self.now_s += seconds
            self.stall.on_message(message)
        if not messages:
            self.now_s += seconds
        return self.stall.look()


@pytest.mark.parametrize("watched", [Watched.ALWAYS, Watched.WHILE_READING])
def test_one_that_says_the_same_again_and_again_brings_nothing(watched: Watched) -> None:
    watch = Watch(watched)
    assert not watch.after(9, moved(1), moved(2), flushed(2), moved(3))
    assert watch.after(3, moved(3), flushed(2), moved(3), flushed(2), moved(3))


@pytest.mark.parametrize("watched", [Watched.ALWAYS, Watched.WHILE_READING])
def test_one_that_never_says_a_word_is_stalled_too(watched: Watched) -> None:
    watch = Watch(watched)
    assert not watch.after(9)
    assert watch.after(2)


@pytest.mark.parametrize("watched", [Watched.ALWAYS, Watched.WHILE_READING])
def test_one_that_brings_a_byte_now_and_then_is_stalled(watched: Watched) -> None:
    """Each byte ends a wait for silence: a copy of a source that trickles would never end."""
    watch = Watch(watched)
    assert not watch.after(1, moved(1))
    assert watch.after(1, *(moved(1 + count / ENOUGH) for count in range(1, 12)))


def test_one_that_is_just_fast_enough_is_not() -> None:
    watch = Watch(Watched.WHILE_READING)
    assert not any(watch.after(AFTER_S / 4, moved(count / 4)) for count in range(400))


def test_one_that_trickles_is_stalled_though_it_waits_for_each_piece_of_a_shared_rate() -> None:
    """The waits do not count, and what lies between them does."""
    watch = Watch(Watched.WHILE_READING)
    for count in range(2):
        assert not watch.after(2.4, moved(1 + count / ENOUGH), ASKS)
        assert not watch.after(1000)
        watch.stall.answered()
    assert not watch.after(2)
    assert watch.after(2)


def test_it_stays_over() -> None:
    watch = Watch(Watched.ALWAYS)
    assert watch.after(11)
    assert watch.after(0, moved(5))


@pytest.mark.parametrize("watched", [Watched.ALWAYS, Watched.WHILE_READING])
def test_one_that_waits_for_the_service_is_not_and_after_its_answer_is(watched: Watched) -> None:
    watch = Watch(watched)
    assert not watch.after(1, moved(1), ASKS)
    assert not watch.after(1000)
    watch.stall.answered()
    assert not watch.after(9)
    assert watch.after(2)


def test_what_comes_after_the_bytes_of_a_disk_takes_as_long_as_it_takes() -> None:
    watch = Watch(Watched.WHILE_READING)
    assert not watch.after(1, moved(100))
    assert not watch.after(1000)
    assert not watch.after(1000, flushed(100, finished=True))
    assert watch.after(11), "the next disk is not opened"


def test_a_verification_knows_no_total_and_is_watched_to_its_end() -> None:
    watch = Watch(Watched.ALWAYS)
    assert not watch.after(9, moved(1, total=1), moved(2, total=2), TELLS)
    assert watch.after(11)


@pytest.mark.parametrize(("watched", "after_s"), [(Watched.NEVER, AFTER_S), (Watched.ALWAYS, None)])
def test_some_are_never_stalled(watched: Watched, after_s: float | None) -> None:
    assert not Watch(watched, after_s).after(1e9)
