"""Who submitted a job, a run, a rehearsal or a wave: as the audit trail names it."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AliasChoices, BeforeValidator, Field

from synvirt.model.values import Model


class Submitter(Model):
    """`account`: of the users file or the host, `token:NAME`, `oidc:NAME`, or `local` by the Unix socket. `role`: the one that
    it had then. `address`: where the request came from; empty by the Unix socket. Earlier versions noted the account alone:
    then `role` and `address` are null."""

    account: str
    role: str | None = None
    address: str | None = None

    def __str__(self) -> str:
        more = ", ".join(part for part in (self.role, self.address) if part)
        return f"{self.account} ({more})" if more else self.account


def _whole(value: Any) -> Any:
    """Earlier versions wrote, and answered, the account as a text."""
    return {"account": value} if isinstance(value, str) else value


def submitter_in(answer: Mapping[str, Any]) -> Submitter | None:
    """Who submitted what the service has answered; an earlier version's answer has the account alone."""
    value = answer.get("submitted_by")
    return None if value is None else Submitter.model_validate(_whole(value))


# The field `submitted_by` of a document. A stored one has it as `submitter`, too (store/documents.py). Null: the service itself
# did it, for example by a schedule.
Submitted = Annotated[
    Submitter | None, BeforeValidator(_whole), Field(validation_alias=AliasChoices("submitter", "submitted_by"))
]
