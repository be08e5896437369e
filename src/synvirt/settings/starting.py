"""What a service needs of its settings to start. The service asks it, and so does `synvirt config check`, earlier."""

import errno
import ipaddress
import os
import socket
import ssl
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from synvirt.errors import BadRequest
from synvirt.settings import Settings
from synvirt.settings.data_dir import check_data_dir
from synvirt.settings.forms import listen_address

_FILES_HINT = "check settings tls_certificate and tls_key"


def check(settings: Settings) -> None:
    """BadRequest says why a service would not start with these settings. Nothing is made. What this user may not read passes:
    the service may be another user."""
    settings.check_host_id()
    check_data_dir(settings)
    settings.check_oidc()
    if settings.oidc_issuer:
        with suppress(PermissionError):
            client_secret(settings)
    check_groups(settings)
    with suppress(PermissionError):
        check_authorities(settings)
    settings.destinations_by_name  # noqa: B018 - its getter checks
    check_database(settings)
    family, kind, protocol, address = found_address(settings)
    with socket.socket(family, kind, protocol) as probe:
        try:
            probe.bind((address[0], 0, *address[2:]))  # the port may be that of the service that runs with these settings
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise BadRequest(f"setting listen: {address[0]} is not an address of this host") from error
    if settings.tls:
        with suppress(PermissionError):
            given_certificate(settings)


def check_groups(settings: Settings) -> None:
    """BadRequest, if auth is by PAM and no group is set: every account of the host could call, mail and backup users
    included."""
    groups = (settings.pam_admin_group, settings.pam_operator_group, settings.pam_viewer_group)
    if settings.auth == "pam" and not any(groups):
        raise BadRequest(
            'auth is "pam", and no group of users is set',
            hint="groupadd synvirt-admin, add the administrators, and set pam_admin_group; pam_operator_group and "
            "pam_viewer_group are for the other roles",
        )


def check_database(settings: Settings) -> None:
    """BadRequest, if the folder of SQLite's file is not there: only data_dir is made by a start."""
    if not settings.database_url.startswith("sqlite:"):
        return
    folder = Path(unquote(urlsplit(settings.database_url).path.removeprefix("/"))).absolute().parent
    with suppress(PermissionError):
        if not folder.is_dir() and folder != settings.data_dir:
            hint = "make it, and let the service's user write there"
            raise BadRequest(f"setting database_url: there is no folder {folder}", hint=hint)


def check_authorities(settings: Settings) -> None:
    """BadRequest, if the file of remote_ca_file has no certificates; PermissionError."""
    file = settings.remote_ca_file
    if file is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(file)
    except PermissionError:
        raise
    except OSError as error:  # ssl.SSLError is one
        why = "no PEM certificate is in it" if isinstance(error, ssl.SSLError) else error.strerror
        raise BadRequest(
            f"setting remote_ca_file: {file} cannot be used: {why}", hint="put the authorities there, or remove the setting"
        ) from error


def client_secret(settings: Settings) -> str:
    """The secret of our client at the OpenID provider; empty: it has none. BadRequest or PermissionError: it cannot be read."""
    file = settings.oidc_client_secret_file
    try:
        return "" if file is None else file.read_text().strip()
    except PermissionError:
        raise
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "it is not text"
        raise BadRequest(f"setting oidc_client_secret_file: {file} cannot be read: {why}") from error


def found_address(settings: Settings) -> tuple[int, int, int, tuple[Any, ...]]:
    """Family, type, protocol and address of the socket to listen on. BadRequest, if the name is not known, or passwords would
    be readable on the way."""
    host, port = listen_address(settings.listen)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or "it can be no host's name"
        raise BadRequest(f"setting listen: {host} is not an address of this host: {why}") from error
    if not settings.tls and not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback:
        raise BadRequest(
            f"setting tls is off, and {host} is not a loopback address: passwords would cross the network in clear",
            hint="listen on 127.0.0.1 behind a proxy of yours, or leave tls on",
        )
    return family, kind, protocol, address


def given_certificate(settings: Settings) -> tuple[Path, Path] | None:
    """The paths of the operator's certificate and key; None, if the service makes its own. BadRequest, if they cannot be
    used; PermissionError, if this user may not read one."""
    path, key = settings.tls_certificate, settings.tls_key
    if path is None and key is None:
        return None
    if path is None or key is None:
        raise BadRequest("settings tls_certificate and tls_key belong together: one is missing")
    check_pair(path, key)
    return path, key


def check_pair(path: Path, key: Path) -> None:
    """BadRequest, if the files are no certificate and its key; PermissionError."""
    for file in (path, key):
        try:
            os.close(os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
            if not file.is_file():
                raise BadRequest(f"{file} is not a file, and a TLS certificate or key is needed there", hint=_FILES_HINT)
        except PermissionError:
            raise
        except OSError as error:
            raise BadRequest(f"the TLS file {file} cannot be read: {error.strerror}", hint=_FILES_HINT) from error

    def locked() -> str:
        raise BadRequest(
            f"{key} is locked by a passphrase, which nobody can type when the service starts",
            hint="openssl pkey -in LOCKED -out KEY unlocks it; let only the service's user read the result",
        )

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(path, key, password=locked)
    except ssl.SSLError as error:
        reason = error.reason or "no PEM text of that kind is in them"
        raise BadRequest(f"{path} and {key} are not a PEM certificate and its key: {reason}", hint=_FILES_HINT) from error
