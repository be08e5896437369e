"""The parts of all models on the wire: the base models, and the forms of numbers, names and times.

Units are in the names: `_bytes`, `_bps` (bytes per second), `_s` (seconds). Times are UTC. Unknown fields are an error in
what a caller sends (`Received`), and never appear in what we answer.
"""

from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, StringConstraints


def now() -> datetime:
    return datetime.now(UTC)


def _rfc3339(value: datetime) -> str:
    text = value.isoformat(timespec="milliseconds")
    # Nearly all are in UTC; to make another of one that is would take half of what this costs.
    if not text.endswith("+00:00"):
        text = value.astimezone(UTC).isoformat(timespec="milliseconds")
    return text.removesuffix("+00:00") + "Z"


def _whole(value: Any) -> Any:
    """4.0 as the integer 4, as JSON has one kind of number. Else the model takes no float for an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


WHOLE = BeforeValidator(_whole)
Time = Annotated[datetime, PlainSerializer(_rfc3339, return_type=str, when_used="json")]
Bytes = Annotated[int, Field(ge=0)]
# An id that people choose: sheets, the command line and URLs use it.
ChosenId = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
# Names end in file names, zfs datasets and XML: 255 is the file system's limit; no control characters.
Name = Annotated[str, StringConstraints(min_length=1, max_length=255, pattern=r"^[^\x00-\x1f\x7f]*$")]


# Marks a field that is calculated for each answer, by the clock, and stored nowhere: nobody changes it.
CALCULATED = "calculated"


class Model(BaseModel):
    """A value: frozen, compared by content."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Received(Model):
    """A value that a caller sends: an unknown field is an error, not silence."""

    model_config = ConfigDict(frozen=True, extra="forbid")
