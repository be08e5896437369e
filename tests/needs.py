"""What a test needs of the machine: a missing program fails the test, with the name of the Debian package that has it."""

import os
from pathlib import Path
from typing import Any, NoReturn

import pytest

from synvirt.errors import SynvirtError
from synvirt.kvm.library import load
from synvirt.programs import find


def lacking(reason: str) -> NoReturn:
    if os.environ.get("CI", "").lower() in ("true", "1"):
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


def need(program: str, package: str) -> str:
    """The program's path. Without it the test is skipped, loudly; on CI it fails, since CI must prove everything."""
    path = find(program)
    if path is None:
        lacking(f"needs the program {program}: apt-get install {package}")
    return path


def need_libvirt() -> Any:
    """libvirt's Python binding."""
    try:
        return load(SynvirtError)
    except SynvirtError:
        lacking("needs libvirt's Python binding: apt-get install python3-libvirt")


def need_folder(path: Path, package: str) -> None:
    if not path.is_dir():
        lacking(f"needs {path}: apt-get install {package}")


def need_root(what_for: str) -> None:
    if os.geteuid() != 0:
        lacking(f"needs root, for {what_for}: run the tests as root")
