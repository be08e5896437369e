"""A session with vCenter or ESXi by pyvmomi: login, keep-alive, properties, tasks; and its faults as our errors. Blocking code.

pyvmomi is one of our dependencies. Without it, or with SYNVIRT_MIGRATOR_SKIP_GO_SHIM=1 (specification part 1:
the control plane left out), `library` raises Internal, and so do all requests to the platform.

Only leaf properties are read, by the PropertyCollector: whole objects are megabytes on a real vCenter, and have values that an
older pyvmomi cannot read.
"""

import http.client
import math
import os
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from itertools import count
from types import SimpleNamespace
from typing import Any, Final, TypeVar

import structlog

from synvirt import __version__
from synvirt.errors import (
    AuthFailed,
    BadRequest,
    Internal,
    SnapshotFailed,
    SourceUnreachable,
    SynvirtError,
    VmNotFound,
    root_cause_of,
)
from synvirt.live.form import Place
from synvirt.live.odd import check_count
from synvirt.live.vsphere import versions
from synvirt.live.vsphere.tap import Connection, tapped
from synvirt.model.access import SourceOptions
from synvirt.transport import Recorder, tls

SKIPPED: Final = "SYNVIRT_MIGRATOR_SKIP_GO_SHIM"
# The first time limit of an answer. A request that takes longer is repeated, with twice the time (`_Answers`).
ANSWER_TIMEOUT_S: Final = 45.0
ANSWER_TIMEOUT_MAX_S: Final = 900.0
# A slow platform gets more time from the start for this long: for a busy night.
SLOW_FOR_S: Final = 3600.0
# The most platforms whose slowness is remembered: more than a host has as sources.
SLOW_MAX: Final = 1000
# vCenter itself waits no longer for a login. If a hanging platform does not answer the logout, the session expires there.
LOGOUT_TIMEOUT_S: Final = 5.0
# vCenter ends a session after 30 minutes without a call.
KEEP_ALIVE_S: Final = 300.0
# One page of a discovery: vCenter makes it in a fraction of a second.
PAGE_OBJECTS: Final = 500
# One; and one more in case another thread's lost session ends ours at that moment.
LOGINS_A_CALL: Final = 2
TASK_PAUSES_S: Final = (0.02, 0.1, 0.25, 0.5, 1.0)

T = TypeVar("T")
log = structlog.get_logger(__name__)


@cache
def _imported() -> Any:
    from pyVmomi import vim, vmodl
    from pyVmomi.SoapAdapter import SoapStubAdapter
    from pyVmomi.VmomiSupport import versionMap

    # pyvmomi's names of the API's versions, by their numbers: 6.5 is «vim.version.version11».
    numbers = {key.removeprefix("vim25/"): name for key, name in versionMap.items() if key.startswith("vim25/")}
    return SimpleNamespace(vim=vim, vmodl=vmodl, stub=SoapStubAdapter, versions=numbers)


def library() -> Any:
    """pyvmomi's `vim`, `vmodl`, `stub` and `versions`; Internal where the control plane was left out."""
    if os.environ.get(SKIPPED) == "1":
        raise Internal(f"vim_api: the control plane is switched off by {SKIPPED}=1", hint=f"unset {SKIPPED}, and start again")
    try:
        return _imported()
    except ImportError as error:
        raise Internal(
            "vim_api: the control plane is not installed", hint="pip install pyvmomi, and start the service again"
        ) from error


def busy_faults() -> tuple[type[Exception], ...]:
    """Errors that pass by themselves: the same request may succeed a little later."""
    vmware = library()
    fault = vmware.vim.fault
    # HostCommunication is also HostNotConnected and HostNotReachable: vCenter answers, but cannot reach the VM's host.
    return (
        fault.TaskInProgress,
        fault.Timedout,
        fault.FileLocked,
        fault.ConcurrentAccess,
        vmware.vmodl.fault.HostCommunication,
    )


def passing_faults() -> tuple[type[Exception], ...]:
    """Faults of a call that pass. SystemError is vCenter's fault for an internal problem: a restart, its single sign-on. As the
    error of a task it means that the task itself has failed, and does not pass."""
    return (*busy_faults(), library().vmodl.fault.SystemError)


# A firewall between us and a host stays for long. A try costs each disk some seconds, in the outage too.
MUTE_FOR_S: Final = 1800.0


class _Answers:
    """How long each platform may take to answer. Its time limit grows while it is slow, as the same limit would fail again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slow: dict[tuple[str, int], tuple[float, float]] = {}

    def limit_s(self, host: str, port: int) -> float:
        with self._lock:
            limit_s, until = self._slow.get((host, port), (ANSWER_TIMEOUT_S, math.inf))
            return limit_s if time.monotonic() < until else ANSWER_TIMEOUT_S

    def was_slow(self, host: str, port: int, limit_s: float) -> float:
        """No answer came within `limit_s`; gives the new limit."""
        grown = min(2 * limit_s, ANSWER_TIMEOUT_MAX_S)
        with self._lock:
            self._slow.pop((host, port), None)
            while len(self._slow) >= SLOW_MAX:
                self._slow.pop(next(iter(self._slow)))
            self._slow[host, port] = (grown, time.monotonic() + SLOW_FOR_S)
        return grown


ANSWERS: Final = _Answers()


def warn_if_missing() -> None:
    """Logs a warning at the service's start, where an operator looks. It only looks for the library, as loading it takes time
    and memory."""
    if os.environ.get(SKIPPED) == "1":
        log.warning("vSphere is not served", cause=f"switched off by {SKIPPED}=1")
    elif find_spec("pyVmomi") is None:
        log.warning(
            "vSphere is not served", cause="pyvmomi is not installed", hint="pip install pyvmomi, and start the service again"
        )


@dataclass(frozen=True, slots=True)
class Row:
    """An object's id, and those of the requested properties that it has."""

    id: str
    properties: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Login:
    """A user of vSphere, and the password."""

    user: str
    password: str = field(repr=False)


class VimSession:
    """Safe from many threads. If the platform has forgotten the session, it is made again, and the call is repeated."""

    def __init__(self, place: Place, login: Login, options: SourceOptions, recorder: Recorder | None = None) -> None:
        self._recorder = recorder
        self.host, self.port = place.host or "", place.port or 443
        self.login_, self.options = login, options
        # Hosts that did not send a file, and until when they are not asked again.
        self._mute: dict[str, float] = {}
        self.api_version = versions.OLDEST
        self._stub: Any = None
        self._content: Any = None
        self._closed = False
        self._logins = 0
        self._changing = threading.RLock()

    @property
    def content(self) -> Any:
        return self._content

    @property
    def session_manager(self) -> str:
        return str(self._content.sessionManager._moId)  # noqa: SLF001 - pyvmomi's own name of an object's id

    @property
    def cookie(self) -> str:
        """The cookie of the session in a request: a secret."""
        return str(self._stub.cookie or "").partition(";")[0]

    # ── in and out ───────────────────────────────────────────────────────────────────────────────────────────────────

    def open(self) -> None:
        """AuthFailed, SourceUnreachable; Internal without pyvmomi."""
        vmware = library()
        options = self.options
        with self._changing, self.mapped("log in"), ExitStack() as undo:
            self._closed = False
            trust = tls.context(self.host, verify=options.verify_tls, fingerprint_sha256=options.fingerprint_sha256)
            limit_s = ANSWERS.limit_s(self.host, self.port)
            theirs = versions.listed(self.host, self.port, trust, limit_s)
            self.api_version = versions.chosen(self.host, theirs, vmware.versions)
            # Not pyvmomi's own thumbprint, which it checks only if the authority is not trusted.
            made = vmware.stub if self._recorder is None else tapped(vmware.stub, self._recorder)
            self._stub = made(
                host=self.host,
                port=self.port,
                version=vmware.versions[self.api_version],
                path="/sdk",
                sslContext=trust,
                httpConnectionTimeout=limit_s,
                customHeaders={"User-Agent": f"SynVirt/{__version__}"},
                acceptCompressedResponses=False,
            )
            self._stub.scheme = Connection  # pyvmomi's own would ask a name server again, without the guard
            undo.callback(self._forget)
            self._content = vmware.vim.ServiceInstance("ServiceInstance", self._stub).RetrieveContent()
            if getattr(self._content, "sessionManager", None) is None:
                raise SourceUnreachable(
                    f"{self.host} answers on port {self.port}, and not as vSphere does",
                    hint="is the address right, or does a proxy or another server answer in its place?",
                )
            self._log_in()
            undo.pop_all()

    def _log_in(self) -> None:
        # With the cookie of a session that has ended, the platform would refuse the login.
        self._stub.cookie = ""
        self._content.sessionManager.Login(self.login_.user, self.login_.password)
        self._logins += 1

    def close(self) -> None:
        """Idempotent; later calls of threads are refused."""
        with self._changing:
            self._closed = True
            if self._content is not None:
                # Its caller waits for it, for example a cancelled job: so it does not wait for a hanging platform.
                self._limit(LOGOUT_TIMEOUT_S)
                with suppress(Exception):  # the session ends by itself
                    self._content.sessionManager.Logout()
                self._forget()

    def _limit(self, seconds: float) -> None:
        """Sets the time limit of answers on new connections; idle ones with another limit are closed."""
        self._stub.schemeArgs["timeout"] = seconds
        self._stub.DropConnections()

    def _forget(self) -> None:
        self._stub.DropConnections()
        self._content = None

    def keep_alive(self) -> None:
        self.call("keep the session", lambda content: content.sessionManager and self._service().CurrentTime())

    def _service(self) -> Any:
        return library().vim.ServiceInstance("ServiceInstance", self._stub)

    # ── calls ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def call(self, what: str, use: Callable[[Any], T]) -> T:
        """Calls `use(content)`; its faults become our errors: «cannot `what`: …»."""
        vmware = library()
        with self.mapped(what):
            for left in reversed(range(LOGINS_A_CALL + 1)):
                content, logins = self._open_content(), self._logins
                try:
                    return use(content)
                except TimeoutError as error:
                    raise self._slow(what) from error
                except vmware.vim.fault.NotAuthenticated:
                    with self._changing:
                        if self._closed or not left:
                            raise
                        if self._logins == logins:  # else another thread has done so since
                            log.info("session was lost; logging in again", host=self.host)
                            self._log_in()
            raise AssertionError("the last try returns or raises")

    def _slow(self, what: str) -> SourceUnreachable:
        with self._changing:
            limit_s = float(self._stub.schemeArgs.get("timeout") or ANSWER_TIMEOUT_S)
            grown = ANSWERS.was_slow(self.host, self.port, limit_s)
            if not self._closed:
                self._limit(grown)
        return SourceUnreachable(
            f"{self.host} did not answer within {limit_s:.0f} s when asked to {what}",
            hint=f"it is asked again, and given {grown:.0f} s; is it overloaded, or does it hang?",
            waited_s=limit_s,
        )

    def _open_content(self) -> Any:
        with self._changing:
            if self._closed or self._content is None:
                raise SourceUnreachable(f"the session with {self.host} is closed")
            return self._content

    def machine(self, vm_id: str) -> Any:
        return self.managed(library().vim.VirtualMachine, vm_id)

    def snapshot(self, snapshot_id: str) -> Any:
        return self.managed(library().vim.vm.Snapshot, snapshot_id)

    def managed(self, kind: Any, id_: str) -> Any:
        """The object of this id, whether it exists or not."""
        return kind(id_, self._stub)

    def properties(self, reference: Any, paths: Iterable[str], *, what: str) -> Mapping[str, Any]:
        """Those of the leaf properties that the object has. VmNotFound, when it is gone."""
        rows = self.call(what, lambda content: self._retrieved(content, [self._of_object(reference, paths)]))
        return rows[0].properties if rows else {}

    def each(self, wanted: Iterable[tuple[Any, Sequence[str]]], *, what: str) -> Mapping[str, Mapping[str, Any]]:
        """For several objects the requested leaf properties, the same for all of one type, by the objects' ids; in one request.
        An object that is gone, or that our user may not see, is left out."""
        asked = list(wanted)
        if not asked:
            return {}
        collector = library().vmodl.query.PropertyCollector
        paths = {type(reference): list(named) for reference, named in asked}
        one = collector.FilterSpec(
            objectSet=[collector.ObjectSpec(obj=reference, skip=False) for reference, _ in asked],
            propSet=[collector.PropertySpec(type=kind, pathSet=named) for kind, named in paths.items()],
            reportMissingObjectsInResults=True,
        )
        rows = self.call(what, lambda content: self._retrieved(content, [one]))
        return {row.id: row.properties for row in rows if row.properties}

    def all_of(self, types: list[Any], paths: Iterable[str], *, what: str) -> list[Row]:
        """All objects of a type, anywhere in the inventory, page by page."""

        def ask(content: Any) -> list[Row]:
            view = content.viewManager.CreateContainerView(content.rootFolder, types, True)
            try:
                return self._retrieved(content, [self._of_view(view, kind, paths) for kind in types])
            finally:
                with suppress(Exception):  # it ends with the session
                    view.DestroyView()

        return self.call(what, ask)

    def _of_object(self, reference: Any, paths: Iterable[str]) -> Any:
        collector = library().vmodl.query.PropertyCollector
        return collector.FilterSpec(
            objectSet=[collector.ObjectSpec(obj=reference, skip=False)],
            propSet=[collector.PropertySpec(type=type(reference), pathSet=list(paths))],
        )

    def _of_view(self, view: Any, kind: Any, paths: Iterable[str]) -> Any:
        vmware = library()
        collector = vmware.vmodl.query.PropertyCollector
        walk = collector.TraversalSpec(name="view", type=vmware.vim.view.ContainerView, path="view", skip=False)
        return collector.FilterSpec(
            objectSet=[collector.ObjectSpec(obj=view, skip=True, selectSet=[walk])],
            propSet=[collector.PropertySpec(type=kind, pathSet=list(paths))],
        )

    def _retrieved(self, content: Any, filters: list[Any]) -> list[Row]:
        collector = content.propertyCollector
        options = library().vmodl.query.PropertyCollector.RetrieveOptions(maxObjects=PAGE_OBJECTS)
        rows: list[Row] = []
        page = collector.RetrievePropertiesEx(filters, options)
        for pages in count(1):
            if page is None:
                break
            rows += [Row(one.obj._moId, {prop.name: prop.val for prop in one.propSet or ()}) for one in page.objects]  # noqa: SLF001
            check_count(self.host, "RetrievePropertiesEx", max(pages, len(rows)))  # a page may be empty
            page = collector.ContinueRetrievePropertiesEx(page.token) if page.token else None
        return rows

    def wait(self, task: Any, *, what: str, timeout_s: float) -> Any:
        """The task's result. Its fault is raised as ours; SourceUnreachable, when it takes longer."""
        deadline = time.monotonic() + timeout_s
        for pause_s in _pauses():
            # Only leaves: a finished task's entity may be gone.
            try:
                found = self.properties(task, ("info.state", "info.error", "info.result"), what=what)
            except VmNotFound as error:
                # A restarted vCenter has forgotten its tasks, but hosts still do them.
                raise SourceUnreachable(
                    f"{self.host} no longer knows the task by which it was to {what}", hint="its result is checked again"
                ) from error
            if found.get("info.state") == "success":
                return found.get("info.result")
            if found.get("info.state") == "error":
                with self.mapped(what, passing=busy_faults()):
                    raise found["info.error"]
            if time.monotonic() > deadline:
                raise SourceUnreachable(f"{self.host} did not {what} within {timeout_s:.0f} s", hint="look at its tasks")
            time.sleep(pause_s)
        raise AssertionError("pauses have no end")

    # ── hosts that send files ────────────────────────────────────────────────────────────────────────────────────────

    def was_mute(self, host: str) -> None:
        """The host did not send a file: for MUTE_FOR_S vCenter is asked instead."""
        self._mute[host] = time.monotonic() + MUTE_FOR_S

    def is_mute(self, host: str) -> bool:
        return time.monotonic() < self._mute.get(host, 0.0)

    # ── faults ───────────────────────────────────────────────────────────────────────────────────────────────────────

    @contextmanager
    def mapped(self, what: str, passing: tuple[type[Exception], ...] | None = None) -> Iterator[None]:
        """Turns any error of pyvmomi into one of ours. `passing`: the faults that pass by themselves, as SourceUnreachable."""
        try:
            yield
        except SynvirtError:
            raise
        except Exception as error:
            raise self._as_ours(what, error, passing_faults() if passing is None else passing) from error

    def _as_ours(self, what: str, error: Exception, passing: tuple[type[Exception], ...]) -> SynvirtError:  # noqa: PLR0911
        """A table in the form of code: the first match counts."""
        vmware = library()
        fault = vmware.vim.fault
        cannot = f"{self.host} cannot {what}: "
        if isinstance(error, (fault.InvalidLogin, fault.InvalidLocale)):
            return AuthFailed(
                f"{self.host} refused the login of {self.login_.user}",
                hint="check user and password; a vCenter user has its domain: administrator@vsphere.local",
            )
        if isinstance(error, fault.NotAuthenticated):
            return AuthFailed(f"{self.host} ended our session while we asked it to {what}")
        if isinstance(error, vmware.vmodl.fault.SecurityError) and (missing := getattr(error, "privilegeId", None)):
            return AuthFailed(
                f"{self.host} does not let {self.login_.user} {what}: it lacks the privilege {missing}",
                hint="docs/platforms/vsphere.md lists the privileges; test the source to see all that are missing",
            )
        if isinstance(error, vmware.vmodl.fault.ManagedObjectNotFound):
            gone = getattr(getattr(error, "obj", None), "_moId", "")
            return VmNotFound(f"{self.host} has no {gone or 'such VM'}, and cannot {what}")
        if isinstance(error, fault.RestrictedVersion):
            return Internal(cannot + _in_words(error), hint="a host with VMware's free licence refuses such calls")
        if isinstance(error, passing):
            return SourceUnreachable(cannot + _in_words(error), hint="it is busy, or its host is away for a while: asked again")
        if isinstance(error, fault.SnapshotFault):
            return SnapshotFailed(cannot + _in_words(error), hint="look at the VM's events; are its disks and datastore well?")
        if isinstance(error, vmware.vmodl.MethodFault):
            return Internal(cannot + _in_words(error), hint="the platform's own events say more")
        return self._as_unreachable(what, error)

    def _as_unreachable(self, what: str, error: Exception) -> SynvirtError:
        if isinstance(error, ssl.SSLCertVerificationError):
            return tls.not_trusted(self.host, error.verify_message)
        if isinstance(error, (OSError, http.client.HTTPException)):
            return SourceUnreachable(
                f"{self.host} does not answer when asked to {what}: {root_cause_of(error)}",
                hint="is the platform up, and the network between?",
            )
        if isinstance(error, (TypeError, ValueError)):
            return BadRequest(f"{self.host} cannot be asked to {what}: {error}")
        return SourceUnreachable(f"{self.host} answered in a way that we do not understand when asked to {what}: {error}")


def _in_words(error: Exception) -> str:
    """A fault's name and the platform's text, in one line."""
    message = " ".join(str(getattr(error, "msg", None) or "").split())
    return f"{type(error).__name__.rpartition('.')[2]}{f' ({message[:300]})' if message else ''}"


def _pauses() -> Iterator[float]:
    yield from TASK_PAUSES_S
    while True:
        yield TASK_PAUSES_S[-1]
