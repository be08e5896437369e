"""The API of a Proxmox VE cluster: one session, by token or ticket. Blocking code, safe from several threads.

Any node answers for the whole cluster. pve-docs, «Proxmox VE API» (api-viewer/apidata.js). A ticket lasts two hours and needs a
CSRF token for each write; an API token needs neither.
"""

import contextlib
import re
import threading
import time
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import quote

from synvirt.errors import AuthFailed, Internal, SourceUnreachable, SynvirtError, VmNotFound
from synvirt.live.form import Place
from synvirt.live.proxmox.form import Login, Options
from synvirt.transport import Answer, HttpClient, Recorder, Trust

# A ticket is valid for two hours; after half of that it is renewed before the next request.
TICKET_GOOD_S: Final = 3600.0
TASK_POLL_S: Final = 0.5
BUSY_HINT: Final = "another operation holds the VM there: it is tried again; `qm unlock` frees one that was left by a failure"
# The status of pveproxy for a node that it cannot reach (PVE::APIServer::AnyEvent).
_NODE_AWAY: Final = (595, 596, 599)
_MESSAGE_CHARS: Final = 400

_GONE = re.compile(r"Configuration file '[^']*' does not exist|no such VM|CT '?[0-9]+'? not running on node|hostname lookup")
_NO_QUORUM = re.compile(r"cluster not ready|no quorum")
_LOCKED = re.compile(r"VM is locked|can't lock file|got timeout|trying to acquire lock")


class Api:
    """`open` it first; `close` at the end. `get`, `post`, `put`, `delete` give the API's `data`."""

    def __init__(self, place: Place, login: Login, options: Options, recorder: Recorder | None = None) -> None:
        host = f"[{place.host}]" if ":" in str(place.host) else place.host
        self.host = str(place.host)
        self._origin = f"https://{host}:{place.port}"
        self._login, self._trust = login, Trust(options.verify_tls, options.fingerprint_sha256)
        self._recorder = recorder
        self._client: HttpClient | None = None
        self._lock = threading.Lock()
        self._ticket_at = 0.0
        self._csrf: str | None = None

    @property
    def user(self) -> str:
        """The owner of the permissions: a user or a token."""
        return str(self._login.user or self._login.token_id)

    def open(self) -> None:
        """SourceUnreachable, AuthFailed."""
        if self._client is not None:
            return
        self._client = HttpClient(self._origin, self._trust, recorder=self._recorder)
        self._ticket_at = 0.0
        try:
            if self._login.token_secret is not None:
                secret = self._login.token_secret.get_secret_value()
                self._client.set_header("Authorization", f"PVEAPIToken={self._login.token_id}={secret}")
            self.get("/version")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Closes the connections. A ticket expires by itself."""
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def get(self, path: str, **query: object) -> Any:
        return self._asked("GET", path, query={name: _written(value) for name, value in query.items()})

    def post(self, path: str, **values: object) -> Any:
        return self._asked("POST", path, form={name: _written(value) for name, value in values.items()})

    def put(self, path: str, **values: object) -> Any:
        return self._asked("PUT", path, form={name: _written(value) for name, value in values.items()})

    def delete(self, path: str) -> Any:
        return self._asked("DELETE", path)

    def wait(self, upid: object, limit_s: float) -> None:
        """Waits until a task has ended. Internal with the task's last message, where it failed; SourceUnreachable after
        `limit_s`."""
        deadline = time.monotonic() + limit_s
        while (status := self.task(upid)).get("status") != "stopped":
            if time.monotonic() > deadline:
                raise SourceUnreachable(f"{self.host}: the task {_kind(upid)} has not ended within {limit_s:.0f} s")
            time.sleep(TASK_POLL_S)
        refuse_failed(upid, status)

    def task(self, upid: object) -> dict[str, Any]:
        """The status of a task, by its UPID."""
        return mapping(self.get(f"{_path_of(self.host, upid)}/status"), "a task")

    def end_task(self, upid: object) -> None:
        """Ends a task that our user has begun; one that has ended is no error."""
        self.delete(_path_of(self.host, upid))

    # ── helpers ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _asked(
        self, method: str, path: str, *, query: Mapping[str, str] | None = None, form: Mapping[str, str] | None = None
    ) -> Any:
        answer = self._answer(method, path, query, form)
        if answer.status == 401 and self._login.password is not None:
            # The ticket may be invalid, for example after a change of the cluster's key.
            with self._lock:
                self._ticket_at = 0.0
            answer = self._answer(method, path, query, form)
        if not answer.ok:
            raise self._refused(method, path, answer)
        found = answer.json()
        if not isinstance(found, dict) or "data" not in found:
            raise SourceUnreachable(
                f"{self.host} does not answer as Proxmox VE does ({method} {path})", hint="are the host and the port right?"
            )
        return found["data"]

    def _answer(self, method: str, path: str, query: Mapping[str, str] | None, form: Mapping[str, str] | None) -> Answer:
        client = self._client
        if client is None:
            raise SourceUnreachable(f"the session with {self.host} is not open")
        self._renew(client)
        headers = {"CSRFPreventionToken": self._csrf} if self._csrf is not None and method != "GET" else {}
        # None: some servers read an empty form as one field without a name.
        return client.request(method, f"/api2/json{path}", query=query or None, form=form or None, headers=headers)

    def _renew(self, client: HttpClient) -> None:
        if self._login.password is None:
            return
        with self._lock:
            if self._ticket_at and time.monotonic() - self._ticket_at < TICKET_GOOD_S:
                return
            form = {"username": str(self._login.user), "password": self._login.password.get_secret_value()}
            client.set_header("Cookie", None)
            answer = client.request("POST", "/api2/json/access/ticket", form=form)
            if answer.status == 401:
                raise AuthFailed(f"{self.host} refused user {self.user}", hint="check user, realm (root@pam) and password")
            if not answer.ok:
                raise self._refused("POST", "/access/ticket", answer)
            made = mapping(mapping(answer.json(), "a login").get("data"), "a login")
            ticket = str(made.get("ticket", ""))
            if not ticket or ticket.startswith("PVE:!tfa!"):
                raise AuthFailed(
                    f"{self.host} asks user {self.user} for a second factor", hint="use an API token: it needs none"
                )
            client.set_header("Cookie", f"PVEAuthCookie={quote(ticket, safe=':=@/+')}")
            self._csrf, self._ticket_at = str(made.get("CSRFPreventionToken", "")), time.monotonic()

    def _refused(self, method: str, path: str, answer: Answer) -> SynvirtError:
        message = _message(answer)
        where = f"{self.host}: {method} {path}: {message}"
        hint = f"give {self.user} the privilege there; a token with privilege separation needs one of its own"
        known: tuple[tuple[bool, type[SynvirtError], str | None], ...] = (
            (answer.status == 401, AuthFailed, "check user and password, or the token's id and secret: it may have expired"),
            (answer.status == 403, AuthFailed, hint),
            (answer.status in _NODE_AWAY, SourceUnreachable, "the VM's node is off, or cut off from the cluster"),
            (_GONE.search(message) is not None, VmNotFound, None),
            (_LOCKED.search(message) is not None, SourceUnreachable, BUSY_HINT),
            (
                _NO_QUORUM.search(message) is not None,
                SourceUnreachable,
                "too few nodes of the cluster see each other: asked again",
            ),
            (answer.status in (502, 503, 504), SourceUnreachable, None),
        )
        kind, advice = next(((kind, advice) for applies, kind, advice in known if applies), (Internal, None))
        return kind(where, hint=advice)


def refuse_failed(upid: object, status: Mapping[str, Any]) -> None:
    """Internal, where an ended task has failed."""
    outcome = str(status.get("exitstatus", ""))
    if outcome == "OK" or outcome.startswith("WARNINGS"):
        return
    if _LOCKED.search(outcome):
        raise SourceUnreachable(f"the task {_kind(upid)} failed: {outcome[:_MESSAGE_CHARS]}", hint=BUSY_HINT)
    raise Internal(f"the task {_kind(upid)} failed: {outcome[:_MESSAGE_CHARS] or 'it gives no reason'}")


def mapping(value: Any, what: str) -> dict[str, Any]:
    """Internal, where it is no mapping, as it comes from outside."""
    if not isinstance(value, dict):
        raise Internal(f"Proxmox VE answered with something other than {what}")
    return value


def rows(value: Any, what: str) -> list[dict[str, Any]]:
    """`value` as a list of objects. Internal, where it is something else; `what` is its name in the error."""
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise Internal(f"Proxmox VE answered with something other than {what}")
    return value


def _written(value: object) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


def _message(answer: Answer) -> str:
    """Newer versions have the reason in the body. All have it in the status line, which is empty if HTTP/2 is in between."""
    with contextlib.suppress(SourceUnreachable):
        found = answer.json()
        if isinstance(found, dict):
            errors = found.get("errors")
            details = "; ".join(f"{name}: {text}" for name, text in errors.items()) if isinstance(errors, dict) else ""
            message = " ".join(filter(None, [str(found.get("message") or "").strip(), details]))
            if message:
                return message[:_MESSAGE_CHARS]
    return (answer.reason or f"status {answer.status}")[:_MESSAGE_CHARS]


def _path_of(host: str, upid: object) -> str:
    """The path of a task, on the node that its UPID names."""
    node = str(upid).split(":")[1] if str(upid).count(":") > 1 else ""
    if not node:
        raise Internal(f"{host} names no task: {str(upid)[:100]!r}")
    return f"/nodes/{quote(node, safe='')}/tasks/{quote(str(upid), safe='')}"


def _kind(upid: object) -> str:
    parts = str(upid).split(":")
    return f"{parts[5]} of VM {parts[6]}" if len(parts) > 6 else str(upid)[:100]
