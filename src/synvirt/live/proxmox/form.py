"""The settings of a Proxmox VE source: its endpoint, its credentials, its options."""

from typing import Annotated, Literal, Self

from pydantic import Field, SecretStr, StringConstraints, model_validator

from synvirt.live.form import Form
from synvirt.model.access import SourceOptions
from synvirt.model.kinds import LiveKind
from synvirt.model.values import Name, Received

_Path = Annotated[str, StringConstraints(min_length=2, max_length=40, pattern=r"^(/[A-Za-z0-9._-]+)+$")]
_Host = Annotated[str, StringConstraints(min_length=1, max_length=255, pattern=r"^[A-Za-z0-9_\[:][A-Za-z0-9._:%\]-]*$")]
_Port = Annotated[int, Field(ge=1, le=65535)]


class Login(Received):
    """`user` with its realm (`root@pam`) and `password`; or an API token: `token_id` (`user@realm!name`) and `token_secret`.

    The disks are read by SSH: with `ssh_private_key`, or `ssh_password`, or for a user of the realm pam with the same name and
    password. With both, `ssh_password` is the key's passphrase."""

    user: Name | None = None
    password: SecretStr | None = None
    token_id: Name | None = None
    token_secret: SecretStr | None = None
    ssh_user: Name | None = None
    ssh_password: SecretStr | None = None
    ssh_private_key: SecretStr | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        by_password = self.user is not None and self.password is not None
        by_token = self.token_id is not None and self.token_secret is not None
        if by_password == by_token:
            raise ValueError("user and password, or token_id and token_secret, are required")
        if by_password and "@" not in str(self.user):
            raise ValueError("user has no realm: root@pam, for example")
        if by_token and ("@" not in str(self.token_id) or "!" not in str(self.token_id)):
            raise ValueError("token_id is user@realm!name")
        return self

    @property
    def ssh_name(self) -> str:
        return self.ssh_user or (str(self.user).rpartition("@")[0] if self._is_of_the_system else "root")

    @property
    def ssh_secret(self) -> SecretStr | None:
        """The password for SSH; None: a key is used."""
        if self.ssh_password is not None or self.ssh_private_key is not None:
            return self.ssh_password
        return self.password if self._is_of_the_system and self.ssh_user in (None, self.ssh_name) else None

    @property
    def has_ssh(self) -> bool:
        return self.ssh_private_key is not None or self.ssh_secret is not None

    @property
    def _is_of_the_system(self) -> bool:
        """Whether it is a system account of the nodes, which sshd knows too."""
        return self.user is not None and self.user.endswith("@pam")


class Options(SourceOptions):
    """`fingerprint_sha256`: of the API's certificate. `ssh_known_hosts`: lines of such a file, with the keys of all nodes.

    `node_hosts`: SSH addresses by the nodes' names, if they differ from the addresses in the cluster's own network.
    `scratch_dir`: a folder on each node for the blocks that guests overwrite while they are read, and for sockets. `quiesce`:
    freeze the guest's file systems, by its agent, for the moment of a snapshot. `backup_access`: freeze a running guest's
    disks by Proxmox VE's own call for backup tools, if its QEMU has it; without it, by filters that every QEMU has."""

    ssh_port: _Port = 22
    ssh_known_hosts: Annotated[str, StringConstraints(min_length=1, max_length=65536)] | None = None
    node_hosts: dict[str, _Host] = Field(default_factory=dict, max_length=64)
    scratch_dir: _Path = "/var/lib/synvirt"
    quiesce: Literal["off", "try", "require"] = "try"
    backup_access: bool = True
    shutdown_timeout_s: Annotated[float, Field(ge=0, le=86400)] = 180


FORM = Form(LiveKind.PVE_API, {"https": 8006}, Login, Options)
