"""A form as a browser sends it: application/x-www-form-urlencoded (WHATWG URL, section 5), bounded, by names."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from email.message import Message
from typing import Annotated
from urllib.parse import parse_qs

from fastapi import Depends, Request

from synvirt.api.received import bounded
from synvirt.errors import BadRequest, UnsupportedMediaType

# A plan for hundreds of machines with a few fields each; more is a mistake or an attack.
FIELDS_MAX = 10_000


@dataclass(frozen=True, slots=True)
class Form:
    """The input of a form. A field may come several times, like check boxes; a missing one is empty."""

    fields: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def text(self, name: str) -> str:
        return next(iter(self.fields.get(name, ())), "").strip()

    def many(self, name: str) -> tuple[str, ...]:
        return self.fields.get(name, ())


async def _read(request: Request) -> Form:
    message = Message()
    message["content-type"] = request.headers.get("content-type", "")
    if message.get_content_type() != "application/x-www-form-urlencoded":
        raise UnsupportedMediaType("this address accepts only forms of this page")
    try:
        found = parse_qs((await bounded(request)).decode(), keep_blank_values=True, max_num_fields=FIELDS_MAX, errors="strict")
    except ValueError as error:
        raise BadRequest("the form was not read: it is damaged, or has too many fields") from error
    return Form({name: tuple(values) for name, values in found.items()})


Sent = Annotated[Form, Depends(_read)]
