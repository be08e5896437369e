"""Entity tags (RFC 9110 section 8.8.3): a change that was made from an old answer is refused instead of undoing another's.

GET ─▶ the stored document ─▶ ETag: its digest
PUT, PATCH, DELETE with If-Match ─▶ in the transaction that writes: the digest of what is stored ─▶ equal, or ChangedMeanwhile
"""

import hashlib
from functools import cache
from typing import Annotated, TypeVar

from fastapi import Depends, Header, Response

from synvirt.errors import BackupConflict, Conflict
from synvirt.model.values import CALCULATED, Model

M = TypeVar("M", bound=Model)


class ChangedMeanwhile(Conflict):
    """The object was changed since the caller loaded it."""

    status = 412


class BackupChangedMeanwhile(BackupConflict):
    """The object was changed since the caller loaded it."""

    status = 412


def tag_of(document: Model, sealed: bytes = b"") -> str:
    """The strong tag of a document. `sealed`: what belongs to it and is in no answer."""
    return tag_of_text(document.model_dump_json(exclude=_calculated(type(document))) + sealed.hex())


@cache
def _calculated(model: type[Model]) -> set[str]:
    return {name for name, field in model.model_fields.items() if CALCULATED in field.metadata}


def tag_of_text(document: str) -> str:
    return f'"{hashlib.sha256(document.encode()).hexdigest()[:32]}"'


class Tagged:
    """The tags of a request: which it was made from, and which its answer has."""

    def __init__(self, response: Response, if_match: str | None) -> None:
        self._response, self._if_match = response, if_match

    def __call__(self, document: M, sealed: bytes = b"") -> M:
        """Gives the document, and its tag in the answer."""
        self._response.headers["ETag"] = tag_of(document, sealed)
        return document

    def check(self, document: Model, sealed: bytes = b"") -> None:
        """ChangedMeanwhile, unless the request was made from the document as it is now, or does not say what it was made
        from. It is called in the transaction that writes."""
        self.check_tag(tag_of(document, sealed))

    def check_tag(self, present: str, *, etag: str | None = None) -> None:
        """As `check`. `etag`: the tag of the document from which the body says that it was made."""
        if etag is not None and etag != present:
            raise ChangedMeanwhile(
                "somebody else has changed it meanwhile: `etag` is of an earlier state",
                hint="export it again, and make the change to what is there now; without `etag` it is replaced in any state",
            )
        if self._if_match is None or self._if_match.strip() == "*":
            return
        # A weak tag (W/"…") is equal to none (RFC 9110 section 13.1.1).
        if present not in (one.strip() for one in self._if_match.split(",")):
            raise ChangedMeanwhile(
                "somebody else has changed it meanwhile: the ETag in If-Match is of an earlier state",
                hint="load it again, and make the change to what is there now",
            )


def _tagging(response: Response) -> Tagged:
    return Tagged(response, None)


def _matching(
    response: Response,
    if_match: Annotated[
        list[str] | None, Header(alias="If-Match", description="The ETag of a GET: 412, where it was changed since")
    ] = None,
) -> Tagged:
    return Tagged(response, None if if_match is None else ",".join(if_match))


# Of a GET, and of a PUT, PATCH or DELETE.
Tags = Annotated[Tagged, Depends(_tagging)]
IfMatch = Annotated[Tagged, Depends(_matching)]
