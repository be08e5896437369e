"""Where a service logs that runs in a process of the tests."""

from typing import TextIO

import structlog


def logs_to(file: TextIO) -> None:
    """By default structlog writes to standard output, and into each traceback the values of all variables, in colours: with a
    service's objects among them that takes seconds, and nobody sees it."""
    *others, _ = structlog.get_config()["processors"]
    plain = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
    structlog.configure(processors=[*others, plain], logger_factory=structlog.PrintLoggerFactory(file))
