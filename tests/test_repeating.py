"""What is repeated goes on after an error."""

from synvirt.repeating import repeated
from tests.running.processes import until


def test_an_error_ends_no_repetition() -> None:
    looks: list[int] = []

    def look() -> None:
        looks.append(1)
        if len(looks) == 1:
            raise OSError("a disk that does not answer")

    with repeated(look, name="test", every_s=0.001):
        until(lambda: len(looks) > 1)
