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
    """Nothing for a local URI. SSH: a private key, or a password (which is the key's passphrase where both are given). TLS: who
    signs the host's certificate, and a client's certificate where the host asks for one. SASL: user and password."""

    user: Name | None = None
    password: SecretStr | None = None
    private_key: SecretStr | None = None
    ca_certificate: _Pem | None = None
    client_certificate: _Pem | None = None
    client_key: SecretStr | None = None


class Options(SourceOptions):
    """`fingerprint_sha256` is of the certificate, or of the SSH host's key; `known_hosts` are lines of such a file instead.

    `scratch_dir` on that host holds what guests overwrite while their disks are read, and the Unix sockets to read by: it is
    made where it is not. `nbd_ports`, first and last, and `nbd_address` are for qemu+tls and qemu+tcp. `allow_plain_nbd`: disks
    may come over the network in the clear."""

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
