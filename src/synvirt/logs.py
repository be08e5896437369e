"""Logs: lines for people in a terminal, one JSON object a line for collectors elsewhere. Ours and the libraries', by one way.

structlog, a job's id bound ─┐
logging (uvicorn, …)  ───────┴─▶ redacted ─▶ people's line │ JSON
"""

import logging
import sys
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any, TextIO

from synvirt.redacting import redacted


@contextmanager
def _missing(name: str) -> Iterator[None]:
    """A module that is not loaded yet cannot be imported meanwhile."""
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[name]


# structlog draws tracebacks with rich where it is there, which ours never are; with it come 3 MiB that a service keeps.
with _missing("rich"):
    import structlog

# What libraries tell of each request or row is of no use to an operator, and some of it quotes what was sent.
_LOUD = ("httpcore", "httpx", "sqlalchemy", "alembic", "botocore", "smbprotocol", "asyncio", "multipart", "python_multipart")


def log_to(level: str, file: TextIO) -> None:
    """Never the values of variables in a traceback: some are secret."""
    number = logging.getLevelNamesMapping()[level.upper()]
    people = file.isatty()
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    last: list[Any] = [
        *([] if people else [structlog.processors.format_exc_info]),
        _without_secrets,
        structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
        if people
        else structlog.processors.JSONRenderer(default=str),
    ]
    structlog.configure(
        processors=[*shared, *last],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(file),
    )
    handler = logging.StreamHandler(file)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
        )
    )
    logging.getLogger().handlers[:] = [handler]
    logging.getLogger().setLevel(number)
    for name in _LOUD:
        logging.getLogger(name).setLevel(max(number, logging.WARNING))


def _without_secrets(_logger: Any, _method: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    kept = {name: line[name] for name in ("exc_info",) if name in line}
    without: dict[str, Any] = redacted({name: value for name, value in line.items() if name not in kept})
    return without | kept
