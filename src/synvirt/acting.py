"""The account that a request acts for: set by `api/callers/gate.py`, read by the code that makes a job or a run.

It is a context variable, because it must pass from the gate through the framework's threads. What the service does by itself
has no account.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from pydantic import BaseModel

from synvirt.accounts import Role
from synvirt.model.submitter import Submitter


@dataclass(slots=True)
class Act:
    """A request of `account` (its name in the audit trail) from `address`, which is empty by the Unix socket. `plan_digest`: of
    the plan in the request, once accepted."""

    account: str
    role: Role
    address: str = ""
    plan_digest: str | None = None
    # The caller logged in on the page, and may log out there.
    by_session: bool = False


_ACT: ContextVar[Act | None] = ContextVar("synvirt.act", default=None)


@contextmanager
def acting(act: Act) -> Iterator[Act]:
    """Within the block, the code acts for this account."""
    token = _ACT.set(act)
    try:
        yield act
    finally:
        _ACT.reset(token)


def current() -> Act | None:
    return _ACT.get()


def submitter() -> Submitter | None:
    """Who asks; None for the service itself, for example a schedule."""
    act = _ACT.get()
    return None if act is None else Submitter(account=act.account, role=str(act.role), address=act.address)


def bring(plan: BaseModel) -> None:
    """Makes the request's entry of the audit trail name this plan."""
    act = _ACT.get()
    if act is not None:
        act.plan_digest = digest_of(plan)


def digest_of(plan: BaseModel) -> str:
    """SHA-256 of the plan as the API shows it, as canonical JSON: sorted keys, no spaces, letters not escaped."""
    content = json.dumps(json.loads(plan.model_dump_json()), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(content.encode()).hexdigest()
