"""What the libraries make again for each service and each command line in the tests' own process, and is the same each time.

Here it is made once a process: a service has 300 routes with 700 adapters of 180 types, and a third of the processor's seconds
of most small tests went there. Programs that tests fork have it too (`tests/forking.py`); what `subprocess` starts has not."""

import functools
import os
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any

import pytest
from fastapi._compat import v2
from fastapi.dependencies import models
from httpx import create_ssl_context
from pydantic import TypeAdapter
from typer.main import get_command

from synvirt import accounts
from synvirt.repository import sealed_key
from tests.libvirt_capabilities import capabilities_known

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

    with capabilities_known(), pytest.MonkeyPatch.context() as patched:
        patched.setattr(v2.ModelField, "__post_init__", of_type)
        for classified in CLASSIFIED:
            patched.setattr(models, classified, by_code(getattr(models, classified).__wrapped__))
        patched.setattr("httpx._transports.default.create_ssl_context", trusting(create_ssl_context))
        for module in GUESSED_AT:
            patched.setattr(module, "SCRYPT_N", 2)
        patched.setattr("typer.testing._get_command", functools.cache(get_command))
        yield


CLASSIFIED = ("_is_gen_callable_cached", "_is_async_gen_callable_cached", "_is_coroutine_callable_cached")


def by_code(classify: Callable[[models._CallIdentity], bool]) -> Callable[[models._CallIdentity], bool]:
    """A plain function is what its code says. FastAPI keeps its answers by function, and so the last 4096 functions with the 16
    services that they are of: half a million objects, through which the garbage collector walks."""
    known: dict[CodeType, bool] = {}

    def classified(identity: models._CallIdentity) -> bool:
        call: Any = identity.call
        if not isinstance(call, FunctionType) or call.__dict__:
            return classify(identity)
        if call.__code__ not in known:
            known[call.__code__] = classify(identity)
        return known[call.__code__]

    return classified


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
