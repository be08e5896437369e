"""The settings of a libvirt source: its endpoint's schemes, its credentials, its options."""

from typing import Annotated, Literal, Self

from pydantic import Field, SecretStr, StringConstraints, model_validator

from synvirt.live.form import Form
from synvirt.model.access import SourceOptions
from synvirt.model.kinds import LiveKind
from synvirt.model.values import Name, Received

# QEMU's own NBD port, and as many more as a host has backups at the same time.
NBD_PORTS = (10809, 10872)
_EVERYWHERE = ("0.0.0.0", "::")  # noqa: S104 - for another host, whose operator chose it
_Pem = Annotated[str, StringConstraints(min_length=1, max_length=65536)]
_Path = Annotated[str, StringConstraints(min_length=2, max_length=80, pattern=r"^/[^\x00-\x1f\x7f]*[^/\x00-\x1f\x7f]$")]
_Port = Annotated[int, Field(ge=1, le=65535)]


class Login(Received):
    """Nothing for a local URI. SSH: a private key, or a password (if both are given, the key's passphrase). TLS: the authority
    of the host's certificate, and a client's certificate if the host requires one. SASL: user and password."""

    user: Name | None = None
    password: SecretStr | None = None
    private_key: SecretStr | None = None
    ca_certificate: _Pem | None = None
    client_certificate: _Pem | None = None
    client_key: SecretStr | None = None


class Options(SourceOptions):
    """`fingerprint_sha256` is that of the certificate, or of the SSH host key. `known_hosts`: lines of such a file instead.

    `scratch_dir`: a folder on that host for the blocks that guests overwrite while their disks are read, and for the Unix
    sockets of the disks; it is made if it does not exist. `nbd_ports` (first and last) and `nbd_address` are for qemu+tls and
    qemu+tcp. `allow_plain_nbd`: disks may be read over the network without encryption."""

    known_hosts: Annotated[str, StringConstraints(min_length=1, max_length=65536)] | None = None
    scratch_dir: _Path = "/var/lib/libvirt/synvirt"
    nbd_ports: tuple[_Port, _Port] = NBD_PORTS
    nbd_address: Annotated[str, StringConstraints(min_length=1, max_length=255)] | None = None
    allow_plain_nbd: bool = False
    quiesce: Literal["off", "try", "require"] = "try"
    shutdown_timeout_s: Annotated[float, Field(ge=0, le=86400)] = 180

    def nbd_host(self, endpoint_host: str | None) -> str | None:
        """The address of its NBD server; for a server on all addresses it is libvirt's, behind a router too."""
        return endpoint_host if self.nbd_address is None or self.nbd_address in _EVERYWHERE else self.nbd_address

    @model_validator(mode="after")
    def _ports_ascend(self) -> Self:
        if self.nbd_ports[0] > self.nbd_ports[1]:
            raise ValueError("nbd_ports: the first port is above the last one")
        return self


FORM = Form(
    LiveKind.LIBVIRT_REMOTE,
    {"qemu+ssh": 22, "qemu+tls": 16514, "qemu+tcp": 16509, "qemu": None, "qemu+unix": None},
    Login,
    Options,
    user_in_endpoint=True,
)
