"""What a check of the doctor is, and what several of them look for: a program, a Python module, a module of QEMU's."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from synvirt.programs import find, run
from synvirt.settings import Settings


class Missing(Exception):
    """Its text: what was looked for, and where."""


@dataclass(frozen=True, slots=True)
class Check:
    """`look`: what was found, in a few words, or Missing. `needed`: does the service as it is set fail without it?"""

    name: str
    what_for: str
    how_to_get: str
    look: Callable[[Settings], str]
    needed: Callable[[Settings], bool] = lambda _: False


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found. `needed`: the settings ask for it. `detail`: the version or path, or what is missing."""

    name: str
    found: bool
    needed: bool
    detail: str
    what_for: str
    how_to_get: str


# A tool that says its version takes no time; one that hangs is as good as missing.
LOOK_TIMEOUT_S = 20


def program(name: str, *version: str) -> Callable[[Settings], str]:
    """A check for a program: where it lies, and its version if `version` are arguments that print it."""

    def look(_: Settings) -> str:
        path = program_path(name)
        return f"{path}: {first_line([name, *version])}" if version else path

    return look


def programs(*names: str) -> Callable[[Settings], str]:
    """A check for several programs: where each of them lies."""
    return lambda _: ", ".join(map(program_path, names))


def program_path(name: str) -> str:
    """Where the program lies. Missing."""
    path = find(name)
    if path is None:
        raise Missing(f"no program {name}")
    return path


def first_line(argv: list[str]) -> str:
    return next(iter(run(argv, timeout_s=LOOK_TIMEOUT_S).stdout.splitlines()), "")[:80]


def python_module(name: str, version: Callable[[], str]) -> Callable[[Settings], str]:
    """A check for a Python module; `version` imports it."""

    def look(_: Settings) -> str:
        try:
            return version()
        except ImportError as error:
            raise Missing(f"Python has no module {name}") from error

    return look


def qemu_module(name: str) -> Callable[[Settings], str]:
    """A check for a module of QEMU (`block-rbd`)."""

    def look(_: Settings) -> str:
        found = next(Path("/usr/lib").glob(f"*/qemu/{name}.so"), None)
        if found is None:
            raise Missing(f"QEMU's module {name} is not installed")
        return str(found)

    return look


def always(_: Settings) -> bool:
    return True
