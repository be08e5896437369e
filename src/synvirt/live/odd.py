"""Answers of platforms that have another form than theirs: a new release, a proxy in between, or an attack."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import structlog
from pydantic import ValidationError

from synvirt.errors import Internal, SynvirtError

log = structlog.get_logger(__name__)

# The most objects of one kind in a list. Large sites have 10,000 VMs, and twenty times as many disks and layers.
OBJECTS_MAX: Final = 200_000


class OddAnswer(Internal):
    """`call` was answered with `what`, which names the field."""

    def __init__(self, where: str, call: str, what: str) -> None:
        super().__init__(
            f"{where} answers {call} with {what}"[:500],
            hint="does a proxy answer in its place? A release of the platform that is not known may do so, too",
        )


def check_count(where: str, call: str, count: int) -> None:
    """OddAnswer, where a list has too many objects, or says so: pages without an end would fill the memory."""
    if count > OBJECTS_MAX:
        raise OddAnswer(where, call, f"{count} objects, more than {OBJECTS_MAX}")


@contextmanager
def reading(where: str, call: str) -> Iterator[None]:
    """Around the code that makes our objects of an answer whose fields it takes as they come. What it then raises is OddAnswer,
    with the field as far as the error names one. The log has the rest, for the level debug."""
    try:
        yield
    except SynvirtError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        log.debug("an answer has another form", host=where, call=call, exc_info=True)
        raise OddAnswer(where, call, f"what is not its form: {_field_of(error)}") from error


def first_mistake(error: ValidationError) -> str:
    """The field, and what is wrong there. The answer itself, which may hold secrets, is in neither."""
    first = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(map(str, first['loc'])) or 'the whole'}: {first['msg']}"


def _field_of(error: Exception) -> str:
    return first_mistake(error) if isinstance(error, ValidationError) else f"{type(error).__name__}: {error}"[:200]
