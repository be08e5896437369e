"""Proxmox VE nodes and clusters, by their API on port 8006. Registered and not served yet: docs/platforms/proxmox.md."""

from typing import Self

from pydantic import SecretStr, model_validator

from synvirt.live import SourceAccess
from synvirt.live.form import Form
from synvirt.live.planned import Planned
from synvirt.model import LiveKind, Name, Received, SourceOptions

COMING = "its API, and the dirty bitmaps of QEMU by NBD, are to come"


class Login(Received):
    """`user` with its realm (`root@pam`) and `password`; or an API token: `token_id` (`user@realm!name`) and `token_secret`."""

    user: Name | None = None
    password: SecretStr | None = None
    token_id: Name | None = None
    token_secret: SecretStr | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        by_password = self.user is not None and self.password is not None
        by_token = self.token_id is not None and self.token_secret is not None
        if by_password == by_token:
            raise ValueError("user and password, or token_id and token_secret, are required")
        if by_password and "@" not in str(self.user):
            raise ValueError("user has no realm: root@pam, for example")
        return self


FORM = Form(LiveKind.PVE_API, {"https": 8006}, Login, SourceOptions)


def pve_api(access: SourceAccess) -> Planned:
    return Planned(access, FORM, COMING)
