"""The events for webhooks of a wave, and their bodies. Pure; `delivering` sends them.

change of a wave or of a member, in its transaction ─▶ an event, or none ─▶ a row for each hook that wants it
"""

import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID, uuid4

from pydantic import BaseModel

from synvirt.errors import Internal, InvalidPlan
from synvirt.fleet.model import WAVE_ENDS, Hook, HookEvent, HookShown, Member, MemberState, Wave, WaveState
from synvirt.keyring import Keyring
from synvirt.model.values import now
from synvirt.store.documents import parsed
from synvirt.store.wave_hooks import NewDelivery, SealedHook

# A cause may be a page long; the report has the rest.
_TEXT_MAX = 2000
# Part of the document of a wave without webhooks. Most waves have none, so thousands of changes need not parse it.
_NO_HOOKS = '"hooks":[]'

_OF_MEMBERS: Mapping[MemberState, HookEvent] = {
    MemberState.CUTTING_OVER: "cutover_began",
    MemberState.HEALTHY: "cutover_ended",
    MemberState.FAILED: "member_failed",
}


def of_wave(before: BaseModel, after: BaseModel) -> Sequence[NewDelivery]:
    """The event of a change of the wave's state."""
    assert isinstance(before, Wave)
    assert isinstance(after, Wave)
    if after.state is before.state:
        return ()
    if after.state in WAVE_ENDS:
        return deliveries(after, "wave_ended")
    if after.state is WaveState.HELD:
        return deliveries(after, "wave_held")
    return deliveries(after, "wave_began") if before.state is WaveState.DRAFT else ()


def of_member(wave_document: str, before: str, after: BaseModel) -> Sequence[NewDelivery]:
    """The event of a change of a member's state. `wave_document`: its wave, as stored."""
    assert isinstance(after, Member)
    if after.state == before or _NO_HOOKS in wave_document:
        return ()
    event: HookEvent | None = _OF_MEMBERS.get(after.state)
    missing = [name for name in after.approvers if name not in {one.approver for one in after.approvals}]
    if after.state is MemberState.READY and missing:
        event = "approval_needed"
    if event is None:
        return ()
    return deliveries(parsed(Wave, wave_document), event, after, missing)


def deliveries(wave: Wave, event: HookEvent, member: Member | None = None, missing: Sequence[str] = ()) -> list[NewDelivery]:
    """A delivery to each webhook that wants the event. `missing`: those whose approval the member needs."""
    wanted = [hook for hook in wave.hooks if event in hook.events]
    if not wanted:
        return []
    content: dict[str, Any] = {
        "event": event,
        "at": now().isoformat(),
        "wave": {"id": str(wave.id), "name": wave.name, "state": wave.state, "reason": _short(wave.reason)},
    }
    if member is not None:
        content["member"] = {
            "id": member.id,
            "vm": member.vm,
            "state": member.state,
            "cause": _short(member.cause),
            "job_id": None if member.job_id is None else str(member.job_id),
            "outage_s": member.outage_s,
            "approvals_missing": list(missing),
        }
    body = json.dumps(content, ensure_ascii=False)
    return [NewDelivery(hook.id, event, body) for hook in wanted]


def _short(text: str | None) -> str | None:
    return None if text is None else text[:_TEXT_MAX]


@dataclass(frozen=True, slots=True)
class Hooks:
    """`commands`: those in this service's settings. `keyring`: seals secrets; None: there is none, for tests."""

    keyring: Keyring | None = None
    host: str = "local"
    commands: Collection[str] = field(default=())

    def check(self, asked: Sequence[Hook]) -> None:
        """InvalidPlan."""
        for place, hook in enumerate(asked):
            if hook.command is not None and hook.command not in self.commands:
                raise InvalidPlan(
                    f"hooks[{place}].command: the settings have no command {hook.command}",
                    hint=f"they have {', '.join(sorted(self.commands)) or 'none'}: see wave_commands in docs/settings.md",
                )

    def held(self) -> AbstractContextManager[None]:
        """What is sealed in the block must be stored in it, so that the key is not changed in between."""
        return nullcontext() if self.keyring is None else self.keyring.held()

    def made(self, asked: Sequence[Hook]) -> tuple[tuple[HookShown, ...], list[SealedHook]]:
        """The hooks as shown, and their sealed secrets."""
        shown = tuple(
            HookShown(id=uuid4(), url=origin(hook), command=hook.command, events=hook.events, required=hook.required)
            for hook in asked
        )
        return shown, [
            SealedHook(one.id, self.host, self._sealed(one.id, hook))
            for one, hook in zip(shown, asked, strict=True)
            if hook.url is not None
        ]

    def _sealed(self, hook_id: UUID, hook: Hook) -> bytes:
        if self.keyring is None:
            raise Internal("a webhook has a secret, and there is no keyring to seal it")
        assert hook.secret is not None
        plain = json.dumps([hook.url, hook.secret.get_secret_value()])
        return self.keyring.seal(plain.encode(), belongs_to=belongs_to(hook_id))

    def opened(self, hook_id: UUID, sealed: bytes) -> tuple[str, bytes]:
        """The URL and the secret. Internal, if this host's key does not open them."""
        if self.keyring is None:
            raise Internal("a webhook has a secret, and there is no keyring to open it")
        url, secret = json.loads(self.keyring.unseal(sealed, belongs_to=belongs_to(hook_id)))
        return str(url), str(secret).encode()


def origin(hook: Hook) -> str | None:
    """The URL's origin: the rest may be a secret, as with chat services."""
    if hook.url is None:
        return None
    parts = urlsplit(hook.url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


def belongs_to(hook_id: UUID) -> bytes:
    """What its sealed URL and secret are bound to; the same form as in `migrations.secrets.belongs_to`, for sealing again."""
    return f"hook {hook_id}".encode()
