"""A session with a XenServer or XCP-ng pool: XenAPI by JSON-RPC 2.0 over HTTPS (/jsonrpc, since XenServer 7.3). Blocking.

    log in ─▶ HOST_IS_SLAVE? at the coordinator that it names ─▶ calls; SESSION_INVALID? log in and call once more

The coordinator may be another host tomorrow. So its pool's members are stored in a file, each with the certificate that a
trusted coordinator has reported: they are asked in turn when the endpoint's host does not answer.
"""

import json
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from ssl import PEM_cert_to_DER_cert
from typing import Any, Final
from xml.sax.saxutils import unescape

import structlog

from synvirt.durable import put_private_file
from synvirt.errors import AuthFailed, Internal, SourceUnreachable, SynvirtError, VmNotFound
from synvirt.live.form import Place
from synvirt.live.odd import OddAnswer, check_count
from synvirt.live.xen.roles import role_for
from synvirt.machines.texts import clean
from synvirt.machines.xenapi import Record, listed, text
from synvirt.model.access import SourceOptions
from synvirt.transport import AnswerTooLarge, HttpClient, Recorder, Trust, tls

ORIGINATOR: Final = "synvirt"
API_VERSION: Final = "1.0"
# xapi ends a session after a day without a call, and the oldest session of one originator if it has over some 500.
KEEP_ALIVE_S: Final = 300.0
# A pool has at most 64 hosts.
MEMBERS_MAX: Final = 64
LOGINS_A_CALL: Final = 2
# The service parses it: small lists in JSON take twenty times as much memory. 5,000 VMs have 27 MiB; a pool with more, or with
# large UEFI variables, is asked for one record after another.
ANSWER_BYTES_MAX: Final = 32 << 20
# Of these calls the answer is one text: the bitmap of a disk of 16 TiB has 45 MiB.
_LARGE_BYTES_MAX: Final = {"VDI.list_changed_blocks": 64 << 20}
# So many records are fetched at once, if all of them are too much for one answer.
RECORDS_AT_ONCE: Final = 4
TASK_PAUSES_S: Final = (0.02, 0.1, 0.25, 0.5, 1.0)
# Stands for our own session in a call's parameters, as it may be another one when the call is made.
OURSELVES: Final = object()
_MEMBERS: Final = "xen-members.json"
# The same request may succeed a little later.
BUSY: Final = frozenset(
    {
        "OTHER_OPERATION_IN_PROGRESS", "VDI_IN_USE", "TOO_MANY_PENDING_TASKS", "HOST_STILL_BOOTING", "HOST_OFFLINE",
        "HOST_NOT_LIVE", "HOST_NOT_ENABLED_TO_MIGRATE", "SR_NOT_ATTACHED", "SR_HAS_NO_PBDS", "CANNOT_CONTACT_HOST",
        "SR_VDI_LOCKING_FAILED", "TASK_CANCELLED", "TOO_BUSY", "HOST_IN_EMERGENCY_MODE",
    }
)  # fmt: skip
# xapi's word for an exception of its own, for example while its toolstack restarts. As the failure of a task it means that the
# task itself has failed, and does not pass.
OF_ITS_OWN: Final = "INTERNAL_ERROR"
_NO_LOGIN: Final = frozenset({"SESSION_AUTHENTICATION_FAILED", "SESSION_AUTHORIZATION_FAILED"})
_GONE: Final = frozenset({"HANDLE_INVALID", "UUID_INVALID"})
# Parameters of a failure are foreign text, sometimes a whole log.
_PARAMETER_CHARS: Final = 200

log = structlog.get_logger(__name__)


class XapiFailure(Exception):
    """A failure of XenAPI: its `code`, and the code's parameters; of a call, or `of_task`."""

    def __init__(self, code: str, parameters: list[str], *, of_task: bool = False) -> None:
        self.code, self.parameters, self.of_task = code, parameters, of_task
        super().__init__(code)

    @property
    def text(self) -> str:
        """For people. References may be a session's, which is a secret, and are left out."""
        shown = [clean(one)[:_PARAMETER_CHARS] for one in self.parameters if "OpaqueRef:" not in one]
        return f"{clean(self.code)[:80]}{': ' + ', '.join(shown) if any(shown) else ''}"


@dataclass(frozen=True, slots=True)
class Login:
    """A user of the pool, and the password."""

    user: str
    password: str = field(repr=False)


class XenSession:
    """Safe from several threads."""

    def __init__(
        self, place: Place, login: Login, options: SourceOptions, folder: Path, recorder: Recorder | None = None
    ) -> None:
        self.endpoint, self.port = place.host or "", place.port or 443
        self.host = self.endpoint
        self.login_, self.options, self.folder = login, options, folder
        self._recorder = recorder
        self._client: HttpClient | None = None
        self._id = ""
        self._logins = 0
        self._changing = threading.RLock()

    @property
    def id(self) -> str:
        """A secret: its holder has our rights."""
        return self._id

    # ── in and out ───────────────────────────────────────────────────────────────────────────────────────────────────

    def open(self) -> None:
        """AuthFailed, SourceUnreachable."""
        with self._changing:
            self._log_in()
        try:
            self._keep_members()
        except (SynvirtError, OSError) as error:  # they are for a day when the endpoint's host is away
            log.warning("the members of the pool are not noted", host=self.host, cause=str(error))

    def _log_in(self) -> None:
        """At the endpoint, or if that is away at another member of its pool; each may redirect us to the coordinator."""
        troubles: list[SourceUnreachable] = []
        for address in dict.fromkeys((self.endpoint, *self.members())):
            try:
                return self._log_in_at(address)
            except SourceUnreachable as error:
                troubles.append(error)
        raise troubles[0]

    def _log_in_at(self, address: str, *, redirected: bool = False) -> None:
        client = HttpClient(origin(address, self.port), self.trust(address), recorder=self._recorder)
        login, earlier = self.login_, self._id
        try:
            with self.translated("log in"):
                self._id = str(
                    self._ask(client, "session.login_with_password", login.user, login.password, API_VERSION, ORIGINATOR)
                )
        except _Elsewhere as error:
            client.close()
            if redirected:
                raise SourceUnreachable(
                    f"{address} is not the coordinator of its pool either, and names {error.address}",
                    hint="the pool has no coordinator at the moment: look at it in XenCenter or Xen Orchestra",
                ) from error
            log.info("the coordinator is another host", asked=address, coordinator=error.address)
            self._log_in_at(error.address, redirected=True)
            return
        except BaseException:
            client.close()
            raise
        if self._client is not None:
            # Sessions belong to the pool: after a change of coordinator an old one of ours stays unused.
            with suppress(SynvirtError, XapiFailure, _Elsewhere):
                self._ask(client, "session.logout", earlier)
            self._client.close()
        self._client, self.host = client, address
        self._logins += 1

    def trust(self, address: str) -> Trust:
        """The trust for a member: the operator's for the endpoint; if that is a pin, the certificate that a coordinator has
        reported for the member."""
        options = self.options
        if options.fingerprint_sha256 is None or address == self.endpoint:
            return Trust(options.verify_tls, options.fingerprint_sha256)
        known = self.members().get(address)
        if known is None:
            raise SourceUnreachable(
                f"{self.endpoint} sends us to {address}, the coordinator of its pool, whose certificate is not known",
                hint=f"register the source by the coordinator: endpoint https://{address}, and its certificate's fingerprint",
            )
        return Trust(fingerprint_sha256=known)

    def members(self) -> dict[str, str]:
        """Address → SHA-256 of the certificate, from a coordinator's last report."""
        try:
            kept = json.loads((self.folder / _MEMBERS).read_text())
            return {str(address): str(pin) for address, pin in kept.items()}
        except (OSError, ValueError, AttributeError):
            return {}

    def _keep_members(self) -> None:
        known = self.members()
        hosts: Mapping[str, Record] = self.call("list its hosts", "host.get_all_records")
        found: dict[str, str] = {}
        for reference, host in list(hosts.items())[:MEMBERS_MAX]:
            address = text(host, "address")
            if address:
                found[address] = known.get(address) or self.certificate_of(reference)
        if found != known:
            self.folder.mkdir(parents=True, exist_ok=True)
            put_private_file(self.folder / _MEMBERS, json.dumps(found).encode())

    def certificate_of(self, host_ref: str) -> str:
        """The SHA-256 fingerprint of a member's certificate, from the coordinator."""
        pem = str(self.call("say which certificate a host has", "host.get_server_certificate", host_ref))
        try:
            return tls.fingerprint(PEM_cert_to_DER_cert(pem.strip()))
        except ValueError as error:
            raise SourceUnreachable(f"{self.host} names no certificate of its host") from error

    def close(self) -> None:
        """Idempotent. It leaves no session behind, as a pool allows only a limited number."""
        with self._changing:
            client, self._client = self._client, None
            if client is not None:
                with suppress(SynvirtError, XapiFailure, _Elsewhere):
                    self._ask(client, "session.logout", self._id)
                client.close()
            self._id = ""

    def keep_alive(self) -> None:
        self.call("keep the session", "session.get_uuid", OURSELVES)

    # ── calls ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def call(self, what: str, method: str, *parameters: Any) -> Any:
        """The result; a failure becomes one of our errors: «cannot `what`: …»."""
        with self.translated(what):
            return self.asked(method, *parameters)

    def asked(self, method: str, *parameters: Any) -> Any:
        """The result. XapiFailure, unchanged; SourceUnreachable."""
        for left in reversed(range(LOGINS_A_CALL + 1)):
            with self._changing:
                if self._client is None:
                    raise SourceUnreachable(f"the session with {self.endpoint} is closed")
                client, session, logins = self._client, self._id, self._logins
            try:
                return self._ask(client, method, session, *[session if one is OURSELVES else one for one in parameters])
            except (XapiFailure, _Elsewhere) as error:
                lost = isinstance(error, _Elsewhere) or error.code == "SESSION_INVALID"
                with self._changing:
                    if not lost or not left or self._client is None:
                        raise
                    if self._logins == logins:  # else another thread has done so since
                        log.info("session was lost; logging in again", host=self.host)
                        self._log_in()
        raise AssertionError("the last try returns or raises")

    def records(self, what: str, kind: str, fields: Collection[str]) -> dict[str, Record]:
        """These fields of all objects of a class, by reference. In one answer; if that would be too large, one by one."""
        try:
            found: dict[str, Record] = self.call(what, f"{kind}.get_all_records")
        except AnswerTooLarge:
            references = self.call(what, f"{kind}.get_all")
            with ThreadPoolExecutor(RECORDS_AT_ONCE) as pool:
                each = pool.map(lambda one: (one, self._fields(what, kind, one, fields)), references)
                return {reference: record for reference, record in each if record is not None}
        return {reference: _only(fields, record) for reference, record in found.items()}

    def _fields(self, what: str, kind: str, reference: str, fields: Collection[str]) -> Record | None:
        """None, where the object has gone meanwhile."""
        try:
            return _only(fields, self.asked(f"{kind}.get_record", reference))
        except XapiFailure as failure:
            if failure.code == "HANDLE_INVALID":
                return None
            raise self.as_ours(what, failure) from failure

    def task(self, what: str, method: str, *parameters: Any, timeout_s: float) -> Any:
        """The same for long operations: starts one, and polls it until it is done. SourceUnreachable, when it takes longer."""
        with self.translated(what):
            return self.awaited(what, method, *parameters, timeout_s=timeout_s)

    def awaited(self, what: str, method: str, *parameters: Any, timeout_s: float) -> Any:
        """Like `task`, but raises XapiFailure unchanged."""
        task = str(self.asked(f"Async.{method}", *parameters))
        deadline = time.monotonic() + timeout_s
        for pause_s in pauses():
            try:
                record: Record = self.asked("task.get_record", task)
            except XapiFailure as error:
                if error.code not in _GONE:
                    raise
                raise SourceUnreachable(
                    f"{self.host} no longer knows the task by which it was to {what}", hint="its result is checked again"
                ) from error
            if (status := text(record, "status")) != "pending":
                with suppress(XapiFailure, SynvirtError):
                    self.asked("task.destroy", task)
                if status == "success":
                    # «<value>OpaqueRef:…</value>», an XML-RPC value; empty for a call without a result.
                    return unescape(text(record, "result").removeprefix("<value>").removesuffix("</value>"))
                failure = listed(record, "error_info") or ["TASK_CANCELLED"]
                raise XapiFailure(failure[0], failure[1:], of_task=True)
            if time.monotonic() > deadline:
                raise SourceUnreachable(f"{self.host} did not {what} within {timeout_s:.0f} s", hint="look at its tasks")
            time.sleep(pause_s)
        raise AssertionError("pauses have no end")

    def _ask(self, client: HttpClient, method: str, *parameters: Any) -> Any:
        order = {"jsonrpc": "2.0", "id": 1, "method": method, "params": list(parameters)}
        # Reading may be repeated: an idle connection may turn out to be closed.
        again = ".get_" in method
        while True:
            try:
                limit_bytes = _LARGE_BYTES_MAX.get(method, ANSWER_BYTES_MAX)
                answer = client.request("POST", "/jsonrpc", json=order, limit_bytes=limit_bytes)
                break
            except AnswerTooLarge:
                raise
            except SourceUnreachable:
                if not again:
                    raise
            again = False
        if not answer.ok:
            raise SourceUnreachable(
                f"{client.where} answers {answer.status} to XenAPI's calls", hint="is it XenServer 7.3 or XCP-ng, or later?"
            )
        reply = answer.json()
        if isinstance(reply, dict) and isinstance(error := reply.get("error"), dict):
            described = error.get("data")
            failure = XapiFailure(
                str(error.get("message")), [str(one) for one in described] if isinstance(described, list) else []
            )
            if failure.code == "HOST_IS_SLAVE" and failure.parameters:
                raise _Elsewhere(failure.parameters[0])
            raise failure
        if not isinstance(reply, dict) or "result" not in reply:
            raise SourceUnreachable(f"{client.where} answers {method} with neither a result nor an error")
        return _shaped(reply["result"], method, client.where)

    # ── failures ─────────────────────────────────────────────────────────────────────────────────────────────────────

    @contextmanager
    def translated(self, what: str) -> Iterator[None]:
        """Turns XenAPI's failures into our errors; `_Elsewhere` passes through to the login."""
        try:
            yield
        except XapiFailure as failure:
            raise self.as_ours(what, failure) from failure

    def as_ours(self, what: str, failure: XapiFailure) -> SynvirtError:
        """A table in the form of code: the first match counts."""
        cannot = f"{self.host} cannot {what}: {failure.text}"
        if failure.code in _NO_LOGIN:
            return AuthFailed(
                f"{self.host} refused the login of {self.login_.user}",
                hint="check user and password; a directory's user has its domain",
            )
        if failure.code == "RBAC_PERMISSION_DENIED":
            permission = clean(failure.parameters[0])[:80] if failure.parameters else "it"
            return AuthFailed(
                f"{self.host} does not let {self.login_.user} {what}: its role lacks {permission}",
                hint=f"give the user the role {role_for(permission)}; docs/platforms/xenserver.md lists what needs which",
            )
        if failure.code in _GONE:
            kind = clean(failure.parameters[0])[:40] if failure.parameters else "object"
            return VmNotFound(f"{self.host} has no such {kind} any more, and cannot {what}")
        if failure.code == "SESSION_INVALID":
            return AuthFailed(f"{self.host} ended our session while we asked it to {what}")
        if failure.code in BUSY or (failure.code == OF_ITS_OWN and not failure.of_task):
            return SourceUnreachable(cannot, hint="it is busy, or a part of it is away for a while or restarts: asked again")
        return Internal(cannot, hint="XenAPI's own words; the pool's log (xensource.log) may say more")


class _Elsewhere(Exception):
    """HOST_IS_SLAVE: the coordinator of the pool is at `address`."""

    def __init__(self, address: str) -> None:
        self.address = clean(address)[:255]
        super().__init__(address)


def _only(fields: Collection[str], record: Record) -> Record:
    return {field: record[field] for field in fields if field in record}


def _is_record(result: Any) -> bool:
    return isinstance(result, dict)


def _are_records(result: Any) -> bool:
    return isinstance(result, dict) and all(isinstance(one, dict) for one in result.values())


def _is_list(result: Any) -> bool:
    return isinstance(result, list) and all(isinstance(one, str) for one in result)


# What a call answers, by the end of its name (the XenServer Management API). The fields of a record are read with care
# (machines/xenapi.py): releases add and drop them.
_SHAPES: Final[tuple[tuple[str, str, Callable[[Any], bool]], ...]] = (
    (".get_all_records", "a table of records", _are_records),
    (".get_record", "a record", _is_record),
    (".get_current_operations", "a table", _is_record),
    (".get_nbd_info", "a list of records", lambda found: isinstance(found, list) and all(map(_is_record, found))),
    (".get_all", "a list of references", _is_list),
    (".get_by_name_label", "a list of references", _is_list),
)


def _shaped(result: Any, method: str, where: str) -> Any:
    """The result of a call. OddAnswer, where it has another form, or too many objects."""
    for name, form, fits in _SHAPES:
        if method.endswith(name):
            if not fits(result):
                raise OddAnswer(where, method, f"a {type(result).__name__} that is not {form}")
            check_count(where, method, len(result))
            return result
    return result


def origin(address: str, port: int) -> str:
    return f"https://[{address}]:{port}" if ":" in address else f"https://{address}:{port}"


def pauses() -> Iterator[float]:
    """The pauses in seconds before each poll of a task, without end."""
    yield from TASK_PAUSES_S
    while True:
        yield TASK_PAUSES_S[-1]
