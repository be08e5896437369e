"""Registered live platforms."""

from typing import Any
from uuid import UUID

from pydantic import Field

from synvirt.model.access import Credentials, Endpoint, SourceName
from synvirt.model.kinds import LiveKind
from synvirt.model.values import Model, Received, Time


class SourceRequest(Received):
    """Body of POST /sources. Which credentials and options there are is the kind's to say: docs/platforms."""

    name: SourceName
    kind: LiveKind
    endpoint: Endpoint
    credentials: Credentials = Field(default_factory=dict)
    options: dict[str, Any] = Field(default_factory=dict)


class SourceChange(Received):
    """Body of PATCH /sources/:id: what is given replaces what was; another `endpoint` needs its credentials with it."""

    name: SourceName | None = None
    endpoint: Endpoint | None = None
    credentials: Credentials | None = None
    options: dict[str, Any] | None = None


class SourceCheck(Model):
    """One thing that must be so for the source to serve. `hint`: what to do where it is not. `warning`: it serves without, and
    not as well."""

    name: str
    ok: bool
    detail: str
    hint: str | None = None
    warning: bool = False
    # What a way of reading a disk brought, where the check measured one.
    bytes_per_s: float | None = None


class SourceTest(Model):
    """`latency_ms`: how long the platform took to take a connection, or to log in where it has no port."""

    ok: bool
    product: str | None = None
    version: str | None = None
    latency_ms: float | None = None
    checks: tuple[SourceCheck, ...] = ()
    at: Time


class Source(Model):
    """A registered live platform. Its credentials are sealed apart, and are in no answer.

    `rates`: bytes a second by way of reading, as the last deep test measured them; a shallow test leaves them.
    """

    id: UUID
    name: str
    kind: LiveKind
    endpoint: str
    options: dict[str, Any] = Field(default_factory=dict)
    created_at: Time
    last_test: SourceTest | None = None
    rates: dict[str, float] = Field(default_factory=dict)
