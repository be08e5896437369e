"""One Prism, Central or Element: its requests with retries, and its refusals as our errors. Blocking code.

After a passing error (409, 429, 502, 503, 504, a service that fails over) a request is repeated, for as long as a fail-over
takes. A request that makes something has its own NTNX-Request-Id, so that its repetition makes no second one.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import quote

from synvirt.disks.download import basic
from synvirt.errors import AuthFailed, Internal, SourceUnreachable, SynvirtError
from synvirt.repeating import tried_again
from synvirt.transport import Answer, HttpClient, Recorder, Trust

# Pauses before each new attempt: a Prism leader that fails over is back within half a minute.
RETRY_PAUSES_S: Final = (0.5, 2.0, 5.0, 10.0, 15.0)
_PASSING: Final = frozenset({409, 429, 502, 503, 504})
_MESSAGE_CHARS: Final = 300
# How often a change is tried, if somebody else changes the same object in between.
_CHANGE_TRIES: Final = 5
DESCRIPTION_CHARS_MAX: Final = 1000


class Refused(Internal):
    """Prism refused a request; `http` is the HTTP status, `message` Prism's own text."""

    def __init__(self, detail: str, *, http: int, message: str, hint: str | None = None) -> None:
        super().__init__(detail, hint=hint)
        self.http, self.message = http, message


class Absent(Refused):
    """There is no such object or path: 404. Prism Central answers 501 for a path that only a cluster serves."""


class Outdated(Refused):
    """The changed object has another version by now: 412. Read it again, and try again."""


class Broken(SourceUnreachable):
    """Prism answered 500: a short fault, or v2's only answer for an unknown object."""


_REFUSALS: Final[Mapping[int, type[Refused]]] = {404: Absent, 412: Outdated, 501: Absent}


@dataclass(frozen=True, slots=True)
class Where:
    """A Prism's address, and the user; empty, where a request has its own token."""

    origin: str
    trust: Trust
    user: str = ""
    password: str = field(default="", repr=False)


class Prism:
    """One Prism and its pool of connections."""

    def __init__(self, where: Where, *, recorder: Recorder | None = None, connections: int = 8) -> None:
        self.where = where
        self._client = HttpClient(
            where.origin,
            where.trust,
            connections=connections,
            headers={
                "accept": "application/json",
                **({"authorization": basic(where.user, where.password)} if where.user else {}),
            },
            recorder=recorder,
        )
        self.host = self._client.host

    def ask(
        self,
        method: str,
        path: str,
        *,
        what: str,
        json: Any = None,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        patient: bool = True,
    ) -> Answer:
        """`what`: the end of «cannot …». Absent, Outdated, Refused, AuthFailed, SourceUnreachable."""
        for pause_s in (*(RETRY_PAUSES_S if patient else ()), None):
            try:
                answer = self._client.request(method, path, query=query, json=json, headers=headers)
            except SourceUnreachable:
                if pause_s is None or method == "POST":
                    raise
                time.sleep(pause_s)
                continue
            if answer.ok:
                return answer
            if answer.status not in _PASSING or pause_s is None:
                raise self._refusal(answer, what)
            time.sleep(pause_s)
        raise AssertionError("the last attempt returns or raises")

    def _refusal(self, answer: Answer, what: str) -> SynvirtError:
        message = words_of(answer)
        detail = f"{self.host} cannot {what}: {answer.status}{f', {message}' if message else ''}"
        status = answer.status
        if status == 401:
            return AuthFailed(f"{self.host} refuses {self.where.user or 'its token'}", hint="check user and password")
        if status == 403:
            return AuthFailed(detail, hint=f"{self.where.user} needs the role Prism Admin or Cluster Admin")
        if (status >= 500 or status in _PASSING) and status not in _REFUSALS:
            kind = Broken if status == 500 else SourceUnreachable
            return kind(detail, hint="it may be failing over, or busy; see the health of its services")
        return _REFUSALS.get(status, Refused)(detail, http=status, message=message)

    def close(self) -> None:
        self._client.close()


def of_newest(change: Callable[[], None]) -> None:
    """Calls what reads an object and then changes it; again, if somebody else has changed it in between. Outdated."""
    tried_again(change, tries=_CHANGE_TRIES, after=lambda error: isinstance(error, Outdated))


def pauses(timeout_s: float) -> Iterator[float]:
    """Pauses until the timeout; they grow to some seconds."""
    until, pause_s = time.monotonic() + timeout_s, 0.05
    while time.monotonic() < until:
        yield pause_s
        time.sleep(pause_s)
        pause_s = min(pause_s * 2, 5.0)


def words_of(answer: Answer) -> str:
    """The text of a refusal, in v4's, v3's or v2's form."""
    try:
        found = answer.json()
    except SynvirtError:
        return ""
    texts: list[str] = []

    def walk(thing: Any, depth: int) -> None:
        if depth > 6 or len(texts) > 3:
            return
        if isinstance(thing, list):
            for one in thing:
                walk(one, depth + 1)
        elif isinstance(thing, dict):
            texts.extend(thing[name] for name in ("message", "reason") if isinstance(thing.get(name), str))
            for name in ("data", "error", "message_list", "error_detail"):
                walk(thing.get(name), depth + 1)

    walk(found, 0)
    return "; ".join(dict.fromkeys(texts))[:_MESSAGE_CHARS]


def described(present: str, note: str) -> str:
    """A VM's description with the note as its last line; unchanged, where it has it, or has no room for it."""
    added = f"{present}\n{note}".strip()
    return present if note in present or len(added) > DESCRIPTION_CHARS_MAX else added


def quoted(part: str) -> str:
    """One part of a path."""
    return quote(part, safe="")


def text(thing: Any, *names: str) -> str:
    """A text in nested objects of an answer; empty, where it is missing."""
    found = dig(thing, *names)
    return "" if found is None else str(found)


def dig(thing: Any, *names: str) -> Any:
    """The value at a path of keys in nested dicts; None where a key is missing."""
    for name in names:
        if not isinstance(thing, dict):
            return None
        thing = thing.get(name)
    return thing


def listed(thing: Any) -> list[dict[str, Any]]:
    """The objects of a list; other entries are ignored."""
    return [one for one in thing if isinstance(one, dict)] if isinstance(thing, list) else []


def number(thing: Any) -> int:
    """The value as an integer; 0, where it is none."""
    try:
        return int(thing)
    except (TypeError, ValueError, OverflowError):  # OverflowError: of Infinity
        return 0
