"""Logs: lines for people in a terminal, else one JSON object a line for collectors. Ours and the libraries' go the same way.

structlog, a job's id bound ─┐
logging (uvicorn, …)  ───────┴─▶ redacted ─▶ people's line │ JSON
"""

import logging
import sys
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

from synvirt.redacting import redacted
from synvirt.texts import printable


@contextmanager
def _missing(name: str) -> Iterator[None]:
    """Within the block, a module that is not loaded yet cannot be imported."""
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[name]


# If rich is installed, structlog draws tracebacks with it. Our logs have none, and rich costs the service 3 MiB of memory.
with _missing("rich"):
    import structlog

# These libraries log each request or row. That does not help an operator, and some of it quotes what was sent.
_LOUD = ("httpcore", "httpx", "sqlalchemy", "alembic", "botocore", "smbprotocol", "asyncio", "multipart", "python_multipart")
# This one logs the traceback of each time-out that it raises, too. What it raises becomes an error of ours.
_LOUDER = ("pypsrp",)


class _Lossy:
    """The file of the logs. A line that it does not take (its disk is full, its reader has gone) is lost: an error here would
    end the thread that logs, often one that just survived another error."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> None:
        with suppress(OSError, ValueError):
            self._file.write(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._file.flush()


def log_to(level: str, file: TextIO) -> None:
    """Sets up the logs. Tracebacks never show the values of variables: some are secret. To log never raises an OSError."""
    number = logging.getLevelNamesMapping()[level.upper()]
    people, lossy = file.isatty(), _Lossy(file)
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    for_people = [_printable, structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)]
    last: list[Any] = [
        structlog.processors.format_exc_info,
        _without_secrets,
        *(for_people if people else [structlog.processors.JSONRenderer(default=str)]),
    ]
    structlog.configure(
        processors=[*shared, *last],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, lossy)),
    )
    handler = logging.StreamHandler(lossy)
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
    for name in _LOUDER:
        logging.getLogger(name).setLevel(logging.CRITICAL)


def _printable(_logger: Any, _method: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """The renderer shows a text without spaces as it is. What is no text it shows by `repr`, which escapes."""
    return {name: printable(value) if isinstance(value, str) else value for name, value in line.items()}


def _without_secrets(_logger: Any, _method: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    without: dict[str, Any] = redacted(dict(line))
    return without
