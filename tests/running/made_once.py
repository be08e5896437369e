"""What the libraries make again for each service and each command line in the tests' own process, and is the same each time.

Here it is made once a process: a service has 300 routes with 700 adapters of 180 types, and a third of the processor's seconds
of most small tests went there. Programs that tests fork have it too (`forking.py`); what `subprocess` starts has not."""

import functools
import os
import signal
import ssl
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, get_args, get_origin

import pytest
from fastapi import routing
from fastapi._compat import v2
from fastapi.datastructures import DefaultPlaceholder
from fastapi.dependencies import models, utils
from fastapi.params import Depends
from httpx import create_ssl_context
from pydantic import TypeAdapter
from pydantic._internal._fields import PydanticMetadata
from pydantic.fields import FieldInfo
from starlette.routing import compile_path
from typer.main import get_command

from synvirt import accounts, programs
from synvirt.doctor import finding, volumes
from synvirt.kvm import connection
from synvirt.offline.hyperv import tool
from synvirt.programs import Output
from synvirt.repository import sealed_key
from tests.servers.libvirt_capabilities import FEATURES_AT_ONCE, capabilities_known

# What a guess of a password costs on purpose, a core's 50 ms and more and 128 MiB: test_accounts.py has that it does.
GUESSED_AT = {module: module.SCRYPT_N for module in (accounts, sealed_key)}


@contextmanager
def made_once() -> Iterator[None]:
    adapters: dict[tuple[object, ...], TypeAdapter[object]] = {}
    make = v2.ModelField.__post_init__

    def of_type(self: v2.ModelField) -> None:
        if self.config is not None:
            make(self)
            return
        field = v2.asdict(self.field_info)
        # Validators and constraints are in the metadata. A default, known by its text alone, is not the adapter's to give.
        key = (type(self.field_info), field["annotation"], *field["metadata"], repr(field["attributes"]))
        if key not in adapters:
            make(self)
            adapters[key] = self._type_adapter
        self._type_adapter = adapters[key]

    answered = answered_once(programs.run)
    with capabilities_known(), pytest.MonkeyPatch.context() as patched:
        for looks in LOOKING:
            patched.setattr(looks, "run", answered)
        patched.setattr(v2.ModelField, "__post_init__", of_type)
        for classified in CLASSIFIED:
            patched.setattr(models, classified, by_code(getattr(models, classified).__wrapped__))
        known = by_signature(utils.get_dependant)
        for module in (utils, routing):
            patched.setattr(module, "get_dependant", known)
        patched.setattr(routing, "compile_path", functools.cache(compile_path))
        patched.setattr(routing, "get_typed_return_annotation", returned(utils.get_typed_return_annotation))
        patched.setattr("httpx._transports.default.create_ssl_context", trusting(create_ssl_context))
        patched.setattr(connection, "QEMU_CONF", connection.QEMU_CONF + FEATURES_AT_ONCE)
        for module in GUESSED_AT:
            patched.setattr(module, "SCRYPT_N", 2)
        patched.setattr("typer.testing._get_command", functools.cache(get_command))
        patched.setattr(signal, "_int_to_enum", numbers_only(signal._int_to_enum))  # type: ignore[attr-defined]
        yield


# A service makes all checks of the doctor at its start, and looks for the tool: thirty programs say what they are, for a sixth
# of a second of a core.
LOOKING = (finding, volumes, tool)
# What they said, by their file and arguments.
ANSWERS: dict[tuple[object, ...], Output] = {}


def answered_once(run: Callable[..., Output]) -> Callable[..., Output]:
    """Of each file of a program, what it says of itself: what is asked for with no more than a limit of time."""

    def answered(argv: Sequence[str], **named: Any) -> Output:
        path = programs.find(argv[0])
        if path is None or set(named) != {"timeout_s"}:
            return run(argv, **named)
        file = Path(path).stat()
        key = (*argv, path, file.st_dev, file.st_ino, file.st_ctime_ns)
        if key not in ANSWERS:
            ANSWERS[key] = run(argv, **named)
        return ANSWERS[key]

    return answered


def numbers_only(known: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Looks up numbers only, as newer Pythons do. Python 3.11 also looks up functions, and writes each one as text into an
    exception that nobody sees. The text of asyncio.run's function contains the task's result: 35 ms of a core for each MiB."""

    def named(value: Any, numbers: Any) -> Any:
        return known(value, numbers) if isinstance(value, int) else value

    return named


CLASSIFIED = ("_is_gen_callable_cached", "_is_async_gen_callable_cached", "_is_coroutine_callable_cached")


def by_code(classify: Callable[[models._CallIdentity], bool]) -> Callable[[models._CallIdentity], bool]:
    """A function or method is what its code says. FastAPI keeps its answers by function, and so the last 4096 functions with
    the 16 services that they are of: half a million objects, through which the garbage collector walks."""
    known: dict[CodeType, bool] = {}

    def classified(identity: models._CallIdentity) -> bool:
        function = getattr(identity.call, "__func__", identity.call)
        if not isinstance(function, FunctionType) or function.__dict__:
            return classify(identity)
        if function.__code__ not in known:
            known[function.__code__] = classify(identity)
        return known[function.__code__]

    return classified


def by_signature(make: Callable[..., models.Dependant]) -> Callable[..., models.Dependant]:
    """What FastAPI reads off a function's parameters is the same for all functions of one code, where the parameters have the
    same types, defaults and descriptions."""
    known: dict[tuple[object, ...], models.Dependant] = {}

    def read(*, path: str, call: Any, **named: Any) -> models.Dependant:
        function = getattr(call, "__func__", call)
        if not isinstance(function, FunctionType) or function.__dict__:
            return make(path=path, call=call, **named)
        defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        try:
            described = tuple(map(_described, (*function.__annotations__.values(), *defaults)))
            key = (path, type(call), function.__code__, *function.__annotations__, *described)
            found = known.get(key)
        except TypeError:
            return make(path=path, call=call, **named)
        if found is None:
            found = make(path=path, call=call, **named)
            known[key] = replace(found, call=None)
        lists: dict[str, Any] = {name: list(getattr(found, name)) for name in LISTS}
        return replace(found, call=call, **lists, **CALLERS | named)

    return read


def returned(read: Callable[..., Any]) -> Callable[..., Any]:
    """What a plain function says that it returns is beside it: FastAPI makes a signature of all its parameters for it."""

    def annotated(call: Callable[..., Any]) -> Any:
        is_plain = isinstance(call, FunctionType) and not call.__dict__
        annotation = call.__annotations__.get("return") if is_plain else ""
        return read(call) if isinstance(annotation, str) else annotation

    return annotated


LISTS = ("path_params", "query_params", "header_params", "cookie_params", "body_params", "dependencies")
# What a caller of get_dependant says, and what it is otherwise.
CALLERS: dict[str, Any] = {
    "name": None,
    "own_oauth_scopes": None,
    "parent_oauth_scopes": None,
    "use_cache": True,
    "scope": None,
    "concurrency": None,
}


def _described(of: Any) -> tuple[object, ...]:
    """A type or a default, by what it says: each function has descriptions of its own, which are equal. TypeError: it says not
    all."""
    if (origin := get_origin(of)) is not None:
        return (origin, *map(_described, get_args(of)))
    if isinstance(of, FieldInfo):
        named = sorted((of._attributes_set | getattr(of, "__dict__", {})).items())
        return (type(of), *map(_described, of.metadata), *((name, _described(value)) for name, value in named))
    if isinstance(of, PydanticMetadata):
        return (type(of), *sorted(vars(of).items()))
    if isinstance(of, DefaultPlaceholder):
        return (type(of), of.value)
    if isinstance(of, list):  # what a callable takes
        return (list, *map(_described, of))
    if isinstance(of, Depends) and not _is_shared(of.dependency):
        raise TypeError
    hash(of)
    return (type(of), of)


def _is_shared(function: Any) -> bool:
    """It has nothing of one service."""
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    return isinstance(function, FunctionType) and all(isinstance(each, type | int) or _is_shared(each) for each in cells)


def trusting(make: Callable[..., ssl.SSLContext]) -> Callable[..., ssl.SSLContext]:
    """What a client of httpx trusts that has no wishes of its own: loading the certificates takes 20 ms of a core."""
    known: dict[tuple[str | None, ...], ssl.SSLContext] = {}

    def trusted(verify: ssl.SSLContext | str | bool = True, cert: Any = None, trust_env: bool = True) -> ssl.SSLContext:
        if verify is not True or cert:
            return make(verify, cert, trust_env)
        key = tuple(os.environ.get(name) for name in ("SSL_CERT_FILE", "SSL_CERT_DIR")) if trust_env else ()
        if key not in known:
            known[key] = make(verify, cert, trust_env)
        return known[key]

    return trusted
