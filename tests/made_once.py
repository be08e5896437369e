"""What the libraries make again for each service and each command line in the tests' own process, and is the same each time.

Here it is made once a process: a service has 300 routes with 700 adapters of 180 types, and a third of the processor's seconds
of most small tests went there. A service in a process of its own makes its own."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from fastapi._compat import v2
from pydantic import TypeAdapter
from typer.main import get_command


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

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(v2.ModelField, "__post_init__", of_type)
        patched.setattr("typer.testing._get_command", functools.cache(get_command))
        yield
