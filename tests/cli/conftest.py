"""A service on real sockets, and the command line in this process."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from synvirt.main import app  # with its own two commands: a program that was built once does not learn new ones
from tests.fakes.service import Service

Run = Callable[..., Any]


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SERVER", "USER", "PASSWORD", "DATA_DIR", "CONFIG", "LOG_LEVEL"):
        monkeypatch.delenv(f"SYNVIRT_{name}", raising=False)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    made = Service(tmp_path, has_pages=False)
    with made.served():
        yield made
    made.close()


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run a command against the service in this test's folder; the result has stdout, stderr, exit_code."""

    def run(*arguments: object, typed: str | None = None) -> Any:
        return CliRunner().invoke(app, ["--data-dir", str(tmp_path), *map(str, arguments)], input=typed, catch_exceptions=False)

    return run
