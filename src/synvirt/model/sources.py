"""Registered live platforms."""

from typing import Any
from uuid import UUID

from pydantic import Field, computed_field

from synvirt.model.access import Credentials, Endpoint, SourceName
from synvirt.model.kinds import LiveKind
from synvirt.model.values import Model, Received, Time


class SourceRequest(Received):
    """Body of POST /sources. Credentials and options depend on the kind: docs/platforms."""

    name: SourceName
    kind: LiveKind
    endpoint: Endpoint
    credentials: Credentials = Field(default_factory=dict)
    options: dict[str, Any] = Field(default_factory=dict)


class SourceChange(Received):
    """Body of PATCH /sources/:id: the fields that are given replace the old ones. A new `endpoint` needs credentials too."""

    name: SourceName | None = None
    endpoint: Endpoint | None = None
    credentials: Credentials | None = None
    options: dict[str, Any] | None = None


class SourceCheck(Model):
    """A requirement of the source, met or not. `hint`: what to do if it is not met. `warning`: the source works without it, but
    less well."""

    name: str
    ok: bool
    detail: str
    hint: str | None = None
    warning: bool = False
    # How fast a way of reading a disk is, where the check measured one: `rate_bps`, by its earlier name.
    bytes_per_s: float | None = None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def rate_bps(self) -> float | None:
        return self.bytes_per_s


class SourceTest(Model):
    """`latency_ms`: how long the platform took to accept a connection, or to log us in where it has no port."""

    ok: bool
    product: str | None = None
    version: str | None = None
    latency_ms: float | None = None
    checks: tuple[SourceCheck, ...] = ()
    at: Time


class Source(Model):
    """A registered live platform. Its credentials are sealed, and are in no answer.

    `rates`: bytes a second for each way of reading, as the last deep test measured them. A shallow test does not change them.
    """

    id: UUID
    name: str
    kind: LiveKind
    endpoint: str
    options: dict[str, Any] = Field(default_factory=dict)
    created_at: Time
    last_test: SourceTest | None = None
    rates: dict[str, float] = Field(default_factory=dict)
