"""Logs disturb no one, and show no secrets."""

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest
import structlog

from synvirt.logs import log_to
from tests.running.logs import logs_to


class _Terminal(StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _settings_kept() -> Iterator[None]:
    handlers, level, ours = logging.getLogger().handlers[:], logging.getLogger().level, structlog.get_config()
    yield
    structlog.configure(**ours)
    logging.getLogger().handlers[:] = handlers
    logging.getLogger().setLevel(level)


def test_a_traceback_of_the_tests_own_logs_is_plain() -> None:
    file = StringIO()
    logs_to(file)
    try:
        raise ValueError("no disk")
    except ValueError:
        structlog.get_logger().exception("this failed")
    assert "Traceback (most recent call last):\n" in file.getvalue()


def test_a_full_disk_below_the_log_ends_no_thread() -> None:
    """In a process of its own: a file with bytes that cannot be written complains at its end."""
    script = """
import os, time
from synvirt.logs import log_to
from tests.running.logs import logs_to
from synvirt.repeating import repeated

log_to("info", open("/dev/full", "w"))
looks = []

def look():
    looks.append(1)
    if len(looks) == 3:
        os._exit(0)
    raise RuntimeError("no store")

with repeated(look, name="lease", every_s=0.001):
    time.sleep(20)
os._exit(1)
"""
    assert subprocess.run([sys.executable, "-c", script], timeout=60, check=False, capture_output=True).returncode == 0


def test_a_value_without_spaces_does_not_control_the_terminal() -> None:
    """The renderer escapes values with spaces alone. Its own colours stay."""
    file, erase = _Terminal(), "\x1b[2J\x9b2J"
    log_to("info", file)
    structlog.get_logger().warning("a file is left out", name=f"web{erase}", path=Path(f"/x{erase}"))
    logging.getLogger("library").warning("%s: gone", f"x{erase}")
    try:
        raise ValueError(f"no{erase}")
    except ValueError:
        structlog.get_logger().exception("this failed")
    printed = file.getvalue()
    assert printed.count("web\ufffd[2J\ufffd2J") == printed.count("x\ufffd[2J\ufffd2J") == 1
    assert ("\x1b[2J" in printed, "\x9b" in printed, "\nTraceback" in printed) == (False, False, True)


@pytest.mark.parametrize("file", [StringIO(), _Terminal()], ids=["lines", "terminal"])
def test_a_traceback_shows_no_secret(file: StringIO) -> None:
    log_to("info", file)
    try:
        raise ValueError("login with password=hunter2hunter2")
    except ValueError:
        structlog.get_logger("ours").exception("this failed")
        logging.getLogger("a library").exception("this failed, too")
    said = file.getvalue()
    assert said.count("ValueError") >= 2
    assert "hunter2" not in said
    assert file.isatty() or all(json.loads(line)["level"] == "error" for line in said.splitlines())


def test_a_time_out_that_pypsrp_raises_too_leaves_no_traceback() -> None:
    file = StringIO()
    logger = logging.getLogger("pypsrp.wsman")
    log_to("debug", file)
    try:
        raise TimeoutError("no answer")
    except TimeoutError:
        logger.exception("ReadTimeout during WSMan request - attempt 0")
    assert file.getvalue() == ""
