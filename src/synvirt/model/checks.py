"""Checks of a guest that has booted: whether it is healthy."""

from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from synvirt.model.values import WHOLE, Received

# A guest's services come up within minutes of its boot.
WITHIN_S = 120
Within = Annotated[float, Field(gt=0, le=3600)]
Argument = Annotated[str, StringConstraints(max_length=4096)]
PageUrl = Annotated[str, StringConstraints(max_length=2048, pattern=r"^https?://")]


class Check(Received):
    """A check of a moved guest's health, besides its boot sign: a TCP port that answers, an HTTP page, or a command that its
    agent runs."""

    kind: Literal["port", "http", "command"]
    port: Annotated[int, Field(ge=1, le=65535), WHOLE] | None = None
    url: PageUrl | None = None
    argv: Annotated[tuple[Argument, ...], Field(max_length=64)] = ()
    within_s: Within = WITHIN_S

    @model_validator(mode="after")
    def _its_own_field(self) -> Self:
        given = {name for name, value in (("port", self.port), ("http", self.url), ("command", self.argv)) if value}
        if given != {self.kind}:
            raise ValueError(
                "a check of kind port has a port, of kind http a url, of kind command an argv, and no other of them"
            )
        return self
