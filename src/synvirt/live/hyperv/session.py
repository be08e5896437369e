"""A PowerShell session of a Hyper-V host: WinRM (MS-WSMV) with PowerShell remoting (MS-PSRP), by the library pypsrp. Blocking.

    session.run("state", VmId="…")  ─▶ the text of scripts/state.ps1, its parameters beside it as data ─▶ JSON

Only this package's own script files are ever run: no text of a caller becomes part of one.
"""

import importlib
import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Final

import structlog

from synvirt.errors import AuthFailed, BadRequest, Internal, SourceUnreachable, SynvirtError, VmNotFound, root_cause_of
from synvirt.live.hyperv import answers
from synvirt.live.hyperv.journal import read, written
from synvirt.live.odd import OddAnswer
from synvirt.texts.json_bounded import TooManyValues, check_values
from synvirt.transport import Answer, Recorder, tls
from synvirt.transport.http import POOLS

log = structlog.get_logger(__name__)

SCRIPTS: Final = (
    *("about", "list", "inspect", "state", "take", "convert", "destroy", "changes", "export", "job", "power", "notes"),
)
CONNECT_TIMEOUT_S: Final = 10
# After OPERATION_TIMEOUT_S WinRM answers a longer request with «not yet», and is asked again.
OPERATION_TIMEOUT_S: Final = 20
READ_TIMEOUT_S: Final = 60
# A snapshot of a busy guest, and the merge after it, take minutes.
SCRIPT_TIMEOUT_S: Final = 1800.0
# Most scripts end within it. At the end of a session, nobody waits for the others any more.
CLOSE_WAIT_S: Final = 30.0
# A busy host takes a minute to start a PowerShell.
OPEN_WITHIN_S: Final = 300.0
# To end one. Nothing depends on it.
GOODBYE_WITHIN_S: Final = 30.0
# All that a host sends for one script: its answer, and what it says of its progress and errors. 5,000 VMs with all their fields
# are under 3 MiB; the ranges of 64 GiB with writes everywhere are under 55.
ANSWER_BYTES_MAX: Final = 96 << 20
ENVELOPE_BYTES_MAX: Final = 16 << 20
# For the whole of an envelope, however steadily its bytes come.
ENVELOPE_WITHIN_S: Final = 300.0
_PIECE_BYTES: Final = 64 << 10
# WSManFault codes (wsmerror.h): WinRM's own limits, and the names of their settings for an administrator.
_QUOTAS: Final[Mapping[int, str]] = {
    0x803381A5: "MaxShellsPerUser",
    0x803381A6: "MaxConcurrentOperationsPerUser",
    0x803381A7: "a quota of the user",
    0x803381A8: "a quota of the system",
    0x803381AB: "MaxConcurrentUsers",
    0x803381E4: "MaxShellsPerUser",
    0x803381E5: "MaxConcurrentUsers",
    0x803381E6: "MaxShells of the plug-in",
    0x803381E7: "MaxConcurrentOperations of the plug-in",
    0x803381E8: "MaxConcurrentOperationsPerUser",
    0x803381E9: "MaxConcurrentCommandsPerShell",
    0x803381EA: "MaxMemoryPerShellMB",
    0x8033803F: "a quota",
}
_TOO_LARGE: Final = frozenset({0x80338048, 0x80338104, 0x80338111})
_DENIED: Final = frozenset({5, 0x80070005})
_NO_SHELL: Final = 0x8033805B
_FAILED_MARK: Final = "SYNVIRT "

clock = time.monotonic


class HyperVRefused(Internal):
    """Hyper-V refused a request: `call` is the method, `value` its return or error code."""

    def __init__(self, detail: str, *, call: str, value: int, text: str) -> None:
        super().__init__(detail, hint="the event log of Hyper-V-VMMS on the host has the details")
        self.call, self.value, self.text = call, value, text


@dataclass(frozen=True, slots=True)
class Address:
    """The address of a host's WinRM. A `fingerprint` is trusted instead of all authorities."""

    host: str
    port: int
    tls: bool = True
    verify: bool = True
    fingerprint: str | None = None

    @property
    def name(self) -> str:
        return f"{self.host}, port {self.port}"


@dataclass(frozen=True, slots=True)
class Credentials:
    """`certificate` and `key` are files, which the library itself reads."""

    auth: str
    user: str = ""
    password: str = field(default="", repr=False)
    certificate: Path | None = None
    key: Path | None = None


@cache
def script(name: str) -> str:
    """The script's text, in the form that is sent."""
    return (resources.files(__package__) / "scripts" / f"{name}.ps1").read_text("utf-8")


class Limits:
    """What a host may take and send for one thing that is asked of it, over all envelopes. The library by itself asks again and
    again as long as a host answers, and keeps all that it sends."""

    def __init__(self, host: str) -> None:
        self._host = host
        self.closed = False
        self.begin("answer", OPEN_WITHIN_S)

    def begin(self, what: str, within_s: float, *, goodbye: bool = False) -> None:
        """`goodbye`: also for a session that is closed."""
        self._what, self._within_s, self._goodbye = what, within_s, goodbye
        self._until, self._left = clock() + within_s, ANSWER_BYTES_MAX

    def check(self, count: int = 0) -> None:
        """`count`: so many bytes more have come. SourceUnreachable, Internal."""
        self._left -= count
        if self.closed and not self._goodbye:
            raise SourceUnreachable(f"{self._host}: the session was closed while it waited for the host")
        if self._left < 0:
            raise Internal(f"{self._host} sent over {ANSWER_BYTES_MAX} bytes to {self._what}")
        if clock() > self._until:
            raise SourceUnreachable(
                f"{self._host} did not {self._what} within {self._within_s:.0f} s",
                hint="is the host overloaded? A job of Hyper-V's may hang: look at the VM's status there",
            )


class Session:
    """One runspace. It runs one script at a time, from any thread."""

    def __init__(self, address: Address, credentials: Credentials, recorder: Recorder | None = None) -> None:
        if not address.tls and credentials.auth in ("basic", "certificate"):
            raise BadRequest(
                f"options.auth: {credentials.auth} over http would send secrets in the clear", hint="use https, port 5986"
            )
        self.address, self._credentials, self._recorder = address, credentials, recorder
        self._lock = threading.Lock()
        self._pool: Any = None
        self._wsman: Any = None
        self._limits = Limits(address.name)

    def open(self) -> None:
        """Logs in. AuthFailed, SourceUnreachable."""
        with self._lock:
            self._limits.closed = False
            self._opened()

    def close(self) -> None:
        """Ends the PowerShell session; scripts of threads are refused until it is opened again. It may be called twice. A
        script that runs is stopped after CLOSE_WAIT_S; what the host has begun for it goes on there."""
        if not self._lock.acquire(timeout=CLOSE_WAIT_S):
            self._limits.closed = True
            self._lock.acquire()
        try:
            self._limits.closed = True
            self._lost()
        finally:
            self._lock.release()

    def run(self, name: str, **parameters: object) -> Any:
        """The script's answer. SourceUnreachable, AuthFailed, VmNotFound, HyperVRefused, OddAnswer."""
        if name not in SCRIPTS:
            raise Internal(f"there is no script {name!r}")
        with self._lock:
            if self._limits.closed:
                raise SourceUnreachable(f"the session with {self.address.name} is closed")
            try:
                text = self._run_once_more(script(name), parameters)
            except SynvirtError:
                raise
            except Exception as error:  # one of the library's many own types
                self._lost()
                raise _translated(error, self.address, f"run {name}.ps1") from error
        try:
            check_values(text)
            found = json.loads(text, object_hook=_unwrapped)
        except TooManyValues as error:
            raise OddAnswer(self.address.name, f"{name}.ps1", str(error)) from error
        except (ValueError, RecursionError) as error:
            raise Internal(
                f"{self.address.name}: {name}.ps1 answered {len(text)} characters that are not JSON: {text[:80]!r}",
                hint="does a profile or a policy of the host print something of its own?",
            ) from error
        if self._recorder is not None:
            sent, answer = (json.dumps(_recordable(one), default=str).encode() for one in (parameters, found))
            self._recorder.answered("POST", f"/wsman/{name}.ps1", {}, sent, Answer(200, {}, answer))
        return answers.checked(name, found, self.address.name)

    # ── by the library ───────────────────────────────────────────────────────────────────────────────────────────────

    def _opened(self) -> Any:
        if self._pool is not None:
            return self._pool
        powershell = _library("pypsrp.powershell")
        try:
            self._wsman = self._connection()
            # Stored before it is open, as a started shell must be ended, too.
            pool = self._pool = powershell.RunspacePool(self._wsman)
            self._limits.begin("open a session", OPEN_WITHIN_S)
            pool.open()
            self._invoked(pool, script("common"), {}, local=False)
        except SynvirtError:
            self._lost()
            raise
        except Exception as error:
            self._lost()
            raise _translated(error, self.address, "open a session") from error
        return pool

    def _connection(self) -> Any:
        address, login = self.address, self._credentials
        extra: dict[str, object] = {}
        if login.auth == "certificate":
            extra = {"certificate_pem": str(login.certificate), "certificate_key_pem": str(login.key)}
        wsman = _library("pypsrp.wsman").WSMan(
            address.host,
            port=address.port,
            ssl=address.tls,
            auth=login.auth,
            username=login.user or None,
            password=login.password or None,
            cert_validation=False if address.fingerprint is not None else address.verify,
            connection_timeout=CONNECT_TIMEOUT_S,
            operation_timeout=OPERATION_TIMEOUT_S,
            read_timeout=READ_TIMEOUT_S,
            no_proxy=True,
            **extra,
        )
        transport = wsman.transport
        transport.session = transport._build_session()  # noqa: SLF001 - as the library offers no other way to choose the trust
        # Neither proxies nor authorities from the service's environment.
        transport.session.trust_env = False
        if address.tls:
            trust = tls.context(address.name, verify=address.verify, fingerprint_sha256=address.fingerprint)
            transport.session.mount("https://", _adapter(trust, self._limits))
        # Also for http: else a redirect from the host would bypass the guard.
        transport.session.mount("http://", _adapter(None, self._limits))
        transport.session.max_redirects = 0
        return wsman

    def _run_once_more(self, text: str, parameters: Mapping[str, object]) -> str:
        """A host ends a shell that was idle for two hours: then nothing has run, and the script is run in a new one."""
        try:
            return self._ended(text, parameters)
        except _library("pypsrp.exceptions").WSManFaultError as error:
            if int(error.code or 0) & 0xFFFFFFFF != _NO_SHELL:
                raise
        self._lost()
        return self._ended(text, parameters)

    def _ended(self, text: str, parameters: Mapping[str, object]) -> str:
        pool = self._opened()
        self._limits.begin("end a script", SCRIPT_TIMEOUT_S)
        return self._invoked(pool, text, parameters, local=True)

    def _invoked(self, pool: Any, text: str, parameters: Mapping[str, object], *, local: bool) -> str:
        shell = _library("pypsrp.powershell").PowerShell(pool)
        shell.add_script(text, use_local_scope=local)
        for key, value in parameters.items():
            shell.add_parameter(key, value)
        for command in shell.commands:
            # The library copies each twice, for lxml, which it does not use: a tenth of the processor's time of a call.
            command.__deepcopy__ = lambda _, same=command: same
        try:
            shell.begin_invoke()
            while shell.state == _RUNNING:
                shell.poll_invoke()
        except SynvirtError:  # a limit
            self._lost()  # ends the script, too
            raise
        if shell.had_errors or shell.streams.error:
            raise _failure(self.address, [str(error) for error in shell.streams.error])
        return "".join(str(part) for part in shell.output)

    def _lost(self) -> None:
        """The next call connects again. If the host does not hear the goodbye, it ends the shell after its idle time; nothing
        depends on it."""
        self._limits.begin("end a session", GOODBYE_WITHIN_S, goodbye=True)
        pool, self._pool = self._pool, None
        wsman, self._wsman = self._wsman, None
        for thing in (pool, wsman):
            if thing is not None:
                try:
                    thing.close()
                except Exception as error:  # whatever a broken connection raises, it is gone
                    log.debug("a session did not end in order", host=self.address.host, cause=str(error)[:200])


# PSInvocationState (MS-PSRP, section 2.2.3.5).
_RUNNING: Final = 1


def _unwrapped(found: dict[str, Any]) -> Any:
    """Windows PowerShell 5.1 writes some arrays as {"value": […], "Count": n}."""
    return found["value"] if found.keys() == {"value", "Count"} and isinstance(found["value"], list) else found


def _recordable(found: Any) -> Any:
    """Without texts and names of people: of a VM's notes only our own line is kept."""
    if isinstance(found, dict):
        return {key: _LEFT_OUT[key](value) if key in _LEFT_OUT else _recordable(value) for key, value in found.items()}
    return [_recordable(one) for one in found] if isinstance(found, list) else found


def _own_line(notes: Any) -> str:
    return written("", read(str(notes)))


_LEFT_OUT: Final[Mapping[str, Callable[[Any], Any]]] = {
    "notes": _own_line,
    "Notes": _own_line,
    "Before": _own_line,
    "user": lambda _: "user",
    "domain": lambda _: "domain.example",
    "dvds": lambda found: [f"{number}.iso" for number, _ in enumerate(found or ())],
}


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Internal(f"the library pypsrp cannot be loaded: {error}", hint="install the service with all it needs") from error


def _adapter(trust: Any, limits: Limits) -> Any:
    """requests' transport with our trust, and with limits on what comes."""
    adapters = _library("requests.adapters")

    class Trusting(adapters.HTTPAdapter):  # type: ignore[misc,name-defined]
        def init_poolmanager(self, *args: Any, **kwargs: Any) -> Any:
            if trust is not None:
                kwargs["ssl_context"] = trust
            super().init_poolmanager(*args, **kwargs)
            self.poolmanager.pool_classes_by_scheme = POOLS

        def cert_verify(self, connection: Any, url: str, verify: Any, cert: Any) -> None:
            super().cert_verify(connection, url, verify, cert)
            if trust is not None:
                connection.ca_certs = connection.ca_cert_dir = None
                connection.cert_reqs = trust.verify_mode
                connection.assert_hostname = None if trust.check_hostname else False

        def send(self, request: Any, **kwargs: Any) -> Any:
            limits.check()
            answer = super().send(request, **{**kwargs, "stream": True})
            try:
                # Where requests keeps a body that was read. By itself it would read any number of bytes, and unpack them.
                answer._content = _envelope(answer.raw, limits)  # noqa: SLF001
                answer._content_consumed = True  # noqa: SLF001
            except BaseException:
                answer.close()
                raise
            return answer

    return Trusting()


def _envelope(body: Any, limits: Limits) -> bytes:
    """All bytes of an answer's body, as they were sent. Internal: too many. SourceUnreachable: too slowly."""
    until, pieces = clock() + ENVELOPE_WITHIN_S, bytearray()
    while piece := body.read1(_PIECE_BYTES, decode_content=False):
        pieces += piece
        limits.check(len(piece))
        if len(pieces) > ENVELOPE_BYTES_MAX:
            raise Internal(f"WinRM answered with an envelope of more than {ENVELOPE_BYTES_MAX} bytes")
        if clock() > until:
            raise SourceUnreachable(f"WinRM sent an envelope for more than {ENVELOPE_WITHIN_S:.0f} s")
    return bytes(pieces)


def _failure(address: Address, errors: list[str]) -> SynvirtError:
    """The error that a script threw."""
    message = " ".join((errors[0] if errors else "it gives no reason").split())
    marked = message.partition(_FAILED_MARK)[2]
    if marked:
        try:
            found = json.loads(marked[: marked.rindex("}") + 1])
            call, value, text = str(found["call"]), int(found["code"] or 0), " ".join(str(found.get("text") or "").split())
        except (ValueError, KeyError, TypeError):
            return HyperVRefused(f"{address.host}: {message[:300]}", call="", value=-1, text=message[:300])
        if value == _GONE and call in ("Get-VM", "Msvm_ComputerSystem"):
            return VmNotFound(f"{address.host}: {text}", hint="list its VMs: it may have moved to another host")
        remark = f" ({text[:300]})" if text else ""
        return HyperVRefused(f"{address.host}: {call} failed with {value}{remark}", call=call, value=value, text=text)
    return HyperVRefused(f"{address.host}: {message[:300]}", call="", value=-1, text=message[:300])


_GONE: Final = 404


def _translated(error: Exception, address: Address, what: str) -> SynvirtError:
    """The library's errors as ours; the error of a wrong pin passes through it unchanged."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, SynvirtError):
            return cause
        cause = cause.__cause__ or cause.__context__
    exceptions = _library("pypsrp.exceptions")
    where = f"{address.name} cannot {what}"
    if isinstance(error, exceptions.AuthenticationError):
        return AuthFailed(
            f"{address.name} refused the login",
            hint="check user and password, that the user is in Remote Management Users, and options.auth",
        )
    if isinstance(error, exceptions.WSManFaultError):
        return _fault(error, address, where)
    if isinstance(error, exceptions.WinRMTransportError):
        return SourceUnreachable(
            f"{where}: it answered with HTTP status {error.code}", hint="is WinRM listening at this port, and nothing else?"
        )
    return SourceUnreachable(
        f"{where}: {' '.join(root_cause_of(error).split())[:300]}",
        hint="is the host up, WinRM on (Enable-PSRemoting), and port 5986 open from here?",
    )


def _fault(error: Any, address: Address, where: str) -> SynvirtError:
    code = int(error.code or 0) & 0xFFFFFFFF
    reason = " ".join(str(error.reason or error.provider_fault or "").split())[:300]
    if code in _QUOTAS:
        return SourceUnreachable(
            f"{where}: a limit of WinRM's is reached, {_QUOTAS[code]}: {reason}",
            hint=f"close other sessions of this user, or raise it: winrm set winrm/config/winrs @{{{_QUOTAS[code]}=…}}",
        )
    if code in _TOO_LARGE:
        return Internal(
            f"{where}: the answer is larger than WinRM's MaxEnvelopeSizekb: {reason}",
            hint='raise it on the host: winrm set winrm/config @{MaxEnvelopeSizekb="8192"}',
        )
    if code in _DENIED:
        return AuthFailed(f"{where}: access is denied", hint="the user must be in Remote Management Users")
    return SourceUnreachable(f"{where}: WinRM fault {code:#010x}: {reason}", hint="it is tried again with a new session")
