"""JSON from other machines. Python's objects are larger than their text: 64 MiB of `{},` are 1.5 GiB."""

import json
from typing import Any, Final

# The largest known answer, 5,000 VMs of a pool with all their fields, has a million. So many empty objects are 220 MiB.
VALUES_MAX: Final = 3_000_000


class TooManyValues(ValueError):
    """A text has room for more than VALUES_MAX values."""


def check_values(content: bytes | str) -> None:
    """TooManyValues. It is for content that is not parsed yet."""
    # Each value but the first has a comma or a bracket before it. Those in texts count, too: it is a limit, no measure.
    signs: tuple[Any, ...] = (b",", b"[", b"{") if isinstance(content, bytes) else (",", "[", "{")
    if sum(content.count(sign) for sign in signs) > VALUES_MAX:
        raise TooManyValues(f"more than {VALUES_MAX} values")


def loads_bounded(content: bytes | str) -> Any:
    """What `json.loads` gives. TooManyValues; ValueError and RecursionError, as there."""
    check_values(content)
    return json.loads(content)
