"""The form of a vSphere source: its credentials and options."""

from typing import Annotated, Literal, Self

from pydantic import Field, SecretStr, StringConstraints, model_validator

from synvirt.live.form import Form
from synvirt.model.access import SourceOptions
from synvirt.model.kinds import LiveKind
from synvirt.model.values import Name, Received


class VimCredentials(Received):
    """A vCenter user with its domain (`administrator@vsphere.local`), or a user of the ESXi host."""

    user: Name
    password: SecretStr


class VimOptions(SourceOptions):
    """`transport`: auto takes VDDK where `vddk_libdir` is set, else the datastore's files where those can be read, else an
    export lease. For files it asks an ESXi host first, and vCenter if no host answers; `datastore` asks only vCenter, `esxi`
    only hosts. `vddk_transports`: VDDK's own list (`san:hotadd:nbdssl`). `shutdown_timeout_s`: how long a guest may take to
    shut down, before it is powered off."""

    transport: Literal["auto", "vddk", "datastore", "esxi", "lease"] = "auto"
    vddk_libdir: Annotated[str, StringConstraints(pattern=r"^/[^\x00-\x1f\x7f]*$", max_length=4096)] | None = None
    vddk_transports: Annotated[str, StringConstraints(pattern=r"^[a-z:]*$", max_length=100)] = ""
    shutdown_timeout_s: Annotated[float, Field(ge=0, le=86400)] = 300

    @model_validator(mode="after")
    def _vddk_lies_somewhere(self) -> Self:
        if self.transport == "vddk" and self.vddk_libdir is None:
            raise ValueError("transport vddk needs vddk_libdir: the folder of VMware's VDDK on this host")
        return self


FORM = Form(LiveKind.VIM_API, {"https": 443}, VimCredentials, VimOptions)
