"""The settings of a kind of source: the endpoint's form, the credentials, the options. They are checked before anything is
tried.

A platform's file describes them as data:

    class Login(Received):
        user: str
        password: SecretStr

    FORM = Form(LiveKind.VIM_API, {"https": 443}, Login, SourceOptions)
    place, login, options = FORM.read(access)
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, get_origin
from urllib.parse import urlsplit

from pydantic import SecretStr, ValidationError

from synvirt.errors import BadRequest
from synvirt.live import Reach, SourceAccess
from synvirt.mistakes import listed
from synvirt.model.access import SourceOptions, in_words_of
from synvirt.model.kinds import LiveKind
from synvirt.model.values import Received

C = TypeVar("C", bound=Received)
O = TypeVar("O", bound=SourceOptions)  # noqa: E741 - beside C


_BETWEEN_PARTS = re.compile(r"[,-]")


@dataclass(frozen=True, slots=True)
class Place:
    """The parts of an endpoint. `path` has no slash at its end; `reach` is None, where the network is not used."""

    scheme: str
    user: str | None
    host: str | None
    port: int | None
    path: str
    query: str

    @property
    def reach(self) -> Reach | None:
        """The address that a test connects to first; None where the endpoint has none."""
        if self.host is None or self.port is None:
            return None
        by_libvirt = self.scheme == "qemu+tls"
        return Reach(self.host, self.port, tls=by_libvirt or self.scheme == "https", own_authority=by_libvirt)


@dataclass(frozen=True, slots=True)
class Form(Generic[C, O]):
    """`schemes`: each with its default port; None, where it has no host. `user_in_endpoint`: whether the endpoint may name a
    user."""

    kind: LiveKind
    schemes: Mapping[str, int | None]
    credentials: type[C]
    options: type[O]
    user_in_endpoint: bool = False

    def read(self, access: SourceAccess) -> tuple[Place, C, O]:
        """The endpoint, the credentials and the options of an access. BadRequest, which names the field, never its value."""
        place = self.place(access.endpoint)
        given = in_words_of(self.credentials.model_fields, access.credentials)
        credentials: C = _validated(self.credentials, given, "credentials")
        for name in self.credentials.model_fields:
            if isinstance(secret := getattr(credentials, name), SecretStr) and not secret.get_secret_value():
                raise BadRequest(f"credentials.{name}: is empty", hint="leave the field out if there is no value")
        return place, credentials, self.read_options(access.options)

    def read_options(self, options: Mapping[str, Any]) -> O:
        """The options. A value with several parts may also be one text, as on a command line: `10809-10872` or `10809,10872`;
        texts by name as `pve1=10.0.0.1;pve2=10.0.0.2`."""
        read: O = _validated(self.options, {key: self._in_parts(key, value) for key, value in options.items()}, "options")
        return read

    def _in_parts(self, key: str, value: Any) -> Any:
        field = self.options.model_fields.get(key)
        if not isinstance(value, str) or field is None:
            return value
        origin = get_origin(field.annotation)
        if origin is tuple:
            return tuple(part.strip() for part in _BETWEEN_PARTS.split(value))
        return pairs(value.split(";")) if origin is dict else value

    def place(self, endpoint: str) -> Place:
        """The parts of an endpoint. BadRequest, where its scheme, host or port does not fit the kind."""
        hint = f"{self.kind} takes " + " or ".join(
            f"{scheme}:///…" if port is None else f"{scheme}://host" for scheme, port in self.schemes.items()
        )
        try:
            url = urlsplit(endpoint)
            port = url.port
        except ValueError as error:
            raise BadRequest(f"endpoint: is not a URL: {error}", hint=hint) from None
        if url.scheme not in self.schemes:
            reason = f"its scheme is {url.scheme[:40]!r}" if url.scheme else "it has no scheme"
            raise BadRequest(f"endpoint: {reason}", hint=hint)
        if port == 0:
            raise BadRequest("endpoint: nothing listens on port 0", hint=hint)
        if url.password is not None:
            raise BadRequest("endpoint: contains a password", hint="send it in credentials, which are stored encrypted")
        if url.username is not None and not self.user_in_endpoint:
            raise BadRequest("endpoint: contains a user", hint="send it in credentials")
        meant = self.schemes[url.scheme]
        if meant is not None and not url.hostname:
            raise BadRequest("endpoint: has no host", hint=hint)
        return Place(
            scheme=url.scheme,
            user=url.username,
            host=url.hostname,
            port=(port or meant) if url.hostname else None,
            path=url.path.rstrip("/"),
            query=url.query,
        )


def pairs(parts: Iterable[str]) -> dict[str, str]:
    """A dict of parts NAME=VALUE. One without `=` gets an empty value, which its model refuses."""
    split = (part.partition("=") for part in parts if part.strip())
    return {name.strip(): value.strip() for name, _, value in split}


def _validated(model: type[Any], values: Mapping[str, Any], what: str) -> Any:
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        reason = listed(error.errors(include_url=False, include_input=False), what)
        known = ", ".join(model.model_fields)
        raise BadRequest(reason, hint=f"{what} are {known}" if known else f"this kind of source has no {what}") from None
