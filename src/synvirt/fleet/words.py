"""Times, lists and names for the sentences about why a member waits."""

from collections.abc import Sequence
from datetime import UTC, datetime

# The most names in a sentence.
NAMED_MAX = 3


def shown_time(at: datetime) -> str:
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M} UTC"


def listed(names: Sequence[str]) -> str:
    """Names in a sentence: `a, b and c`; of many the first NAMED_MAX and how many more."""
    more = len(names) - NAMED_MAX
    if more > 0:
        return f"{', '.join(names[:NAMED_MAX])} and {more} more"
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]
