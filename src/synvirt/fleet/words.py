"""Times, lists and names for the sentences about why a member waits."""

from collections.abc import Sequence
from datetime import UTC, datetime

# The most names in a sentence.
NAMED_MAX = 3


def shown_time(at: datetime) -> str:
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M} UTC"


def shown_s(seconds: float) -> str:
    """A duration in seconds, minutes, hours or days: `45 s`, `3.5 h`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 2 * 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 72 * 3600 else f"{seconds / 86400:.1f} days"


def listed(names: Sequence[str]) -> str:
    """Names in a sentence: `a, b and c`; of many the first NAMED_MAX and how many more."""
    more = len(names) - NAMED_MAX
    if more > 0:
        return f"{', '.join(names[:NAMED_MAX])} and {more} more"
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]
