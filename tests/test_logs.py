"""Logs disturb no one, and show no secrets."""

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from io import StringIO

import pytest
import structlog

from synvirt.logs import log_to


class _Terminal(StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _settings_kept() -> Iterator[None]:
    handlers, level = logging.getLogger().handlers[:], logging.getLogger().level
    yield
    structlog.reset_defaults()
    logging.getLogger().handlers[:] = handlers
    logging.getLogger().setLevel(level)


def test_a_full_disk_below_the_log_ends_no_thread() -> None:
    """In a process of its own: a file with bytes that cannot be written complains at its end."""
    script = """
import os, time
from synvirt.logs import log_to
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
