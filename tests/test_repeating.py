"""What is repeated goes on after an error."""

import pytest

from synvirt.repeating import repeated, tried_again
from tests.running.processes import until


def test_an_error_ends_no_repetition() -> None:
    looks: list[int] = []

    def look() -> None:
        looks.append(1)
        if len(looks) == 1:
            raise OSError("a disk that does not answer")

    with repeated(look, name="test", every_s=0.001):
        until(lambda: len(looks) > 1)


@pytest.mark.parametrize(("failures", "calls"), [([], 1), ([OSError()], 2), ([OSError(), OSError()], 3)])
def test_an_attempt_is_made_until_it_succeeds(failures: list[Exception], calls: int) -> None:
    made = _Attempt(failures)
    assert tried_again(made, tries=3, after=lambda error: isinstance(error, OSError)) == calls


@pytest.mark.parametrize(("failures", "calls"), [([OSError()] * 3, 3), ([ValueError()], 1), ([OSError(), ValueError()], 2)])
def test_the_last_error_is_raised_and_one_of_another_kind_at_once(failures: list[Exception], calls: int) -> None:
    made = _Attempt(failures)
    with pytest.raises(type(failures[-1])):
        tried_again(made, tries=3, after=lambda error: isinstance(error, OSError))
    assert made.calls == calls


class _Attempt:
    """Raises these errors, one a call, and then returns how often it was called."""

    def __init__(self, failures: list[Exception]) -> None:
        self.calls, self._failures = 0, list(failures)

    def __call__(self) -> int:
        self.calls += 1
        if self._failures:
            raise self._failures.pop(0)
        return self.calls
