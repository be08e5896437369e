"""Errors, as a job keeps them and as the API answers them."""

from synvirt.model.kinds import State
from synvirt.model.values import Model, Time


class Problem(Model):
    """`last_error` of a job; with `fatal` false the job goes on."""

    code: str
    message: str
    hint: str | None = None
    fatal: bool = True
    at: Time
    state: State


class ProblemDetails(Model):
    """RFC 9457 `application/problem+json`, with the E_ code and a hint."""

    type: str = "about:blank"
    title: str
    status: int
    code: str
    detail: str
    hint: str | None = None
