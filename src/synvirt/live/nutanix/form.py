"""The settings of a Nutanix source: its endpoint, credentials and options."""

from typing import Annotated, Literal

from pydantic import Field, SecretStr, StringConstraints

from synvirt.live.form import Form
from synvirt.model.access import Endpoint, Fingerprint, SourceOptions
from synvirt.model.kinds import LiveKind
from synvirt.model.values import Name, Received

_Host = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9.:_-]{1,253}$")]
_Port = Annotated[int, Field(ge=1, le=65535)]
# RFC 3720, section 3.2.6.3.1: the form of an iqn name.
_Initiator = Annotated[str, StringConstraints(pattern=r"^iqn\.[0-9]{4}-[0-9]{2}\.[a-z0-9.-]{1,100}(:[a-z0-9.:-]{1,100})?$")]

Transport = Literal["auto", "nfs", "iscsi", "image"]


class Login(Received):
    """`element_user` and `element_password`: those of Prism Element, if they differ from Prism Central's."""

    user: Name
    password: SecretStr
    element_user: Name | None = None
    element_password: SecretStr | None = None


class Options(SourceOptions):
    """`prism_element`: the cluster's own https://HOST[:9440], if the endpoint is Prism Central; its certificate is pinned by
    `element_fingerprint_sha256`. `nfs_host` and `data_services` (host:port): the addresses of the cluster's NFS and iSCSI, if
    they differ from those that it reports. `extend_allow_list`: this host may be put on a container's allow-list while its
    snapshots are read; `client_address` is this host's address as the cluster sees it."""

    prism_element: Endpoint | None = None
    element_fingerprint_sha256: Fingerprint | None = None
    transport: Transport = "auto"
    nfs_host: _Host | None = None
    nfs_port: _Port | None = None
    mount_port: _Port | None = None
    data_services: _Host | None = None
    initiator: _Initiator = "iqn.2024-01.org.synvirt:host"
    extend_allow_list: bool = False
    client_address: _Host | None = None
    shutdown_timeout_s: Annotated[float, Field(ge=0, le=86400)] = 300
    # For snapshots and recovery points that are never removed, as this host is gone forever.
    expire_days: Annotated[int, Field(ge=1, le=365)] = 30


FORM = Form(LiveKind.PRISM_API, {"https": 9440}, Login, Options)
