"""The forms of settings' values: how a text of the file or the environment is read, and which texts are refused.

A wrong value that was found only later would stop every request, or silently match nothing. No error has a value that may hold
a password.
"""

import re
import shlex
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator

from synvirt.addresses import is_network

# What needs no escape in a URL (RFC 3986 section 2.3). «.» and «..» would be removed by browsers.
_SEGMENT = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._~-]+")
# A host's name, maybe an international one; `*.` before it stands for all names under it.
_HOST = re.compile(r"(\*\.)?[\w-]+(\.[\w-]+)*\.?")
_DATABASES = "must be postgresql://user@host/database, or sqlite:///PATH"


def _given(value: Any) -> Any:
    """The text of a path. ValueError, if it can be none: an empty one would be the folder in which the service was started."""
    if str(value) == "" or "\0" in str(value):
        raise ValueError("a path is needed, and this text is empty" if str(value) == "" else "a path has no NUL character")
    return value


# A relative path is meant from where the service was started. Its workers have other folders, so they need the whole path.
Place = Annotated[Path, BeforeValidator(_given), AfterValidator(Path.absolute)]


def words(value: Any) -> Any:
    """A list, or its form in the environment."""
    return tuple(value.replace(",", " ").split()) if isinstance(value, str) else value


def paths(value: Any) -> Any:
    """The same for paths, which may contain spaces."""
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


def pairs(value: Any) -> Any:
    """A table, or its form in the environment: name=value, separated by commas."""
    if not isinstance(value, str):
        return value
    return {name.strip(): meaning.strip() for name, _, meaning in (part.rpartition("=") for part in value.split(",") if part)}


def _host_and_port(value: str) -> str:
    """Checked before anything is made, as a first start makes accounts and keys."""
    listen_address(value)
    return value


def listen_address(value: str) -> tuple[str, int]:
    """Host and port. An IPv6 address is in brackets. ValueError."""
    host, colon, port = value.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isascii() or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{value!r} is not HOST:PORT, like 127.0.0.1:8441")
    return host, int(port)


def _base_url(value: str) -> str:
    path = value.strip("/")
    if path and not all(_SEGMENT.fullmatch(segment) for segment in path.split("/")):
        raise ValueError("must be a path of letters, digits and -._~ alone: /synvirt, for example, without a host")
    return value


def _networks(values: tuple[str, ...]) -> tuple[str, ...]:
    for value in values:
        if not is_network(value):
            raise ValueError(f"{value[:64]!r} is neither an address nor a network: 10.0.0.5 or 10.0.0.0/8, for example")
    return values


def _hosts(values: tuple[str, ...]) -> tuple[str, ...]:
    for value in values:
        if not is_network(value) and not _HOST.fullmatch(value):
            raise ValueError(
                f"{value[:64]!r} is neither a host's name nor a network: nas.example, *.example or 10.0.0.0/8, for example"
            )
    return values


def _tool_arguments(value: str) -> str:
    parts = shlex.split(value)
    missing = [name for name in ("{source}", "{folder}") if not any(name in part for part in parts)]
    if missing:
        raise ValueError(f"it lacks {' and '.join(missing)}")
    return value


def _database_url(value: str) -> str:
    if not value or re.match(r"sqlite:///.", value):
        return value
    if not re.match(r"postgresql(\+psycopg)?://", value):
        raise ValueError(_DATABASES)
    try:
        urlsplit(value).port  # noqa: B018 - its getter checks
    except ValueError:
        raise ValueError(f"{_DATABASES}; its port is none") from None
    return value


Listen = Annotated[str, AfterValidator(_host_and_port)]
BasePath = Annotated[str, AfterValidator(_base_url)]
Words = Annotated[tuple[str, ...], BeforeValidator(words)]
Networks = Annotated[tuple[str, ...], BeforeValidator(words), AfterValidator(_networks)]
Hosts = Annotated[tuple[str, ...], BeforeValidator(words), AfterValidator(_hosts)]
ToolArguments = Annotated[str, AfterValidator(_tool_arguments)]
DatabaseUrl = Annotated[str, AfterValidator(_database_url)]
