"""Lists of both Prisms, read page by page although others change them meanwhile. Blocking code."""

from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import structlog

# How often a list is read that changes meanwhile.
LIST_TRIES: Final = 5

log = structlog.get_logger(__name__)


class Page(NamedTuple):
    """`start`: the place of its first entry in the list. `total`: how long the list is then; None: it does not say."""

    start: int
    entries: list[dict[str, Any]]
    total: int | None = None


def joined(
    host: str, what: str, id_of: Callable[[dict[str, Any]], str], pages: Callable[[], Iterator[Page]]
) -> list[dict[str, Any]]:
    """All entries of a list. Each of its `pages` begins with the last entries of the one before: if they are others, or the
    list has another length, some came or went meanwhile, and one may be on no page. Then all are read again. Of a list that
    never holds still, all that was ever seen counts: what is gone by now does no harm."""
    seen: dict[str, dict[str, Any]] = {}
    for _ in range(LIST_TRIES):
        found: list[dict[str, Any]] = []
        totals: set[int | None] = set()
        still = True
        for page in pages():
            again = found[page.start :]
            still &= [id_of(one) for one in again] == [id_of(one) for one in page.entries[: len(again)]]
            totals.add(page.total)
            found += page.entries[len(again) :] if still else page.entries
        if still and len(totals) == 1:
            return found
        seen |= {id_of(one): one for one in found}
    log.warning("a list changes while it is read", host=host, what=what, tries=LIST_TRIES)
    return list(seen.values())


def windows(total: int, most: int) -> Iterator[tuple[int, int]]:
    """The number and the size of each page of a list of `total` entries. A page begins at its number times its size, so pages
    of one size have no entry in common. Of all sizes up to `most`, each page has the one with which it begins at or before the
    last entry of the page before, and reaches the farthest."""
    page, size = 0, most
    yield page, size
    while (end := (page + 1) * size) < total:
        reached = {((end - 1) // size + 1) * size: size for size in range(1, most + 1)}
        size = reached[max(reached)]
        page = (end - 1) // size
        yield page, size
