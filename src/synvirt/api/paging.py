"""Pages of a list: `?cursor=` is the `next_cursor` of the page before, a number of the store; of a short list of things with
names, the last name."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Annotated, TypeVar

from fastapi import Query
from pydantic import Field, StringConstraints

from synvirt.errors import BadRequest, SynvirtError

T = TypeVar("T")

PAGE_LIMIT = 1000
Limit = Annotated[int, Query(ge=1, le=PAGE_LIMIT)]
# The limit of SQL's BIGINT.
CURSOR_LIMIT = 2**63 - 1

# A number that the store may be asked for.
Number = Annotated[int, Field(ge=0, le=CURSOR_LIMIT)]
# A text that the store may be asked for: PostgreSQL takes no null byte.
Sought = Annotated[str, StringConstraints(max_length=255, pattern=r"^[^\x00-\x1f\x7f]*$")]

Cursor = Annotated[str | None, Query(pattern=r"^[1-9][0-9]{0,18}$", description="`next_cursor` of a page")]


LastName = Annotated[Sought | None, Query(description="`next_cursor` of a page")]


def number_of(cursor: str | None, refused: type[SynvirtError] = BadRequest) -> int | None:
    """The cursor in the store's form; `refused`, if it is larger than any that the store gave out."""
    number = int(cursor) if cursor is not None else None
    if number is not None and number > CURSOR_LIMIT:
        raise refused(f"cursor: {cursor} is not one of this service")
    return number


def cursor_of(number: int | None) -> str | None:
    """The next page's cursor. None: this was the last page."""
    return None if number is None else str(number)


def named_page(
    items: Sequence[T],
    name: Callable[[T], str],
    *,
    limit: int,
    cursor: str | None,
    refused: type[SynvirtError] = BadRequest,
    removable: bool = False,
) -> tuple[tuple[T, ...], str | None]:
    """A page of a list that is in memory as a whole, and the cursor of the next page. `cursor`: the name of the last item of
    the page before; `refused`, if there is no such item. `removable`: it may have been removed since; the items are in the
    order of their names."""
    names = [name(item) for item in items]
    if cursor is not None and not removable and cursor not in names:
        raise refused(f"cursor: {cursor[:100]!r} is not one of this service", hint="begin again without one")
    start = 0 if cursor is None else bisect_right(names, cursor) if removable else names.index(cursor) + 1
    end = start + limit
    return tuple(items[start:end]), names[end - 1] if end < len(items) else None
