"""The settings of a Hyper-V source: its endpoint, its credentials, its options."""

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, SecretStr, StringConstraints, model_validator

from synvirt.live.form import Form
from synvirt.model.access import SourceOptions
from synvirt.model.kinds import LiveKind
from synvirt.model.values import Name, Received

HTTPS_PORT, HTTP_PORT, SMB_PORT = 5986, 5985, 445
# A cluster has at most 64 nodes; a host rarely has more volumes than letters.
PAIRS_MAX = 64


def pairs(text: str) -> dict[str, str]:
    """`NAME=VALUE;NAME=VALUE` as names and values. ValueError."""
    found: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(";"))):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not (name and equals and value):
            raise ValueError("must be NAME=VALUE, or several of them separated by semicolons")
        found[name] = value
    if len(found) > PAIRS_MAX:
        raise ValueError(f"has more than {PAIRS_MAX} pairs")
    return found


def _are_pairs(text: str) -> str:
    pairs(text)
    return text


_Pairs = Annotated[str, StringConstraints(max_length=16384, pattern=r"^[^\x00-\x1f\x7f]*$"), AfterValidator(_are_pairs)]


# A folder of a share, or of a drive of the host; never the root of a drive.
_FOLDER = r"^$|^(\\\\[^\\/?.*<>|\":\x00-\x1f][^\\/?*<>|\":\x00-\x1f]*|[A-Za-z]:)(\\[^\\/?*<>|\":\x00-\x1f]+)+\\?$"


class Login(Received):
    """A local user, `DOMAIN\\user` or `user@domain`; or a client certificate that WinRM maps to one. With a certificate,
    `smb_user` reads the disks, since SMB accepts no certificates. `smb_user` may always be another user than that of WinRM."""

    user: Name | None = None
    password: SecretStr | None = None
    certificate: Annotated[str, StringConstraints(min_length=1, max_length=65536)] | None = None
    key: SecretStr | None = None
    smb_user: Name | None = None
    smb_password: SecretStr | None = None

    @model_validator(mode="after")
    def _one_way_in(self) -> Self:
        if (self.user is None) != (self.password is None):
            raise ValueError("user and password must be given together")
        if (self.certificate is None) != (self.key is None):
            raise ValueError("certificate and key must be given together")
        if (self.smb_user is None) != (self.smb_password is None):
            raise ValueError("smb_user and smb_password must be given together")
        if self.user is None and self.certificate is None:
            raise ValueError("user and password are needed, or certificate and key")
        if self.user is None and self.smb_user is None:
            raise ValueError("a certificate works only for WinRM: give smb_user and smb_password to read the disks")
        return self


class Options(SourceOptions):
    """`auth`: the authentication for WinRM; negotiate is Kerberos if it works, else NTLM. `shares`: named shares of folders,
    `D:\\VMs=vms;E:\\=disks`, instead of the administrative ones (`D$`). `nodes`: addresses of a cluster's nodes,
    `NODE1=10.0.0.1`, if this host cannot resolve their names. `read_by`: `in_place`; or `export`: Hyper-V first writes each
    snapshot's disks to the folder `export_to`, which is a share (`\\\\files\\exports`) or is in one (`D:\\Exports`); or `auto`:
    in place if possible. `shutdown_timeout_s`: how long a guest may take to shut down, before it is switched off."""

    auth: Literal["negotiate", "kerberos", "ntlm", "basic", "certificate"] = "negotiate"
    shares: _Pairs = ""
    nodes: _Pairs = ""
    read_by: Literal["auto", "in_place", "export"] = "auto"
    export_to: Annotated[str, StringConstraints(max_length=1024, pattern=_FOLDER)] = ""
    smb_port: Annotated[int, Field(ge=1, le=65535)] = SMB_PORT
    shutdown_timeout_s: Annotated[float, Field(ge=0, le=86400)] = 300

    @model_validator(mode="after")
    def _somewhere_to_export_to(self) -> Self:
        if self.read_by == "export" and not self.export_to:
            raise ValueError("read_by=export needs export_to, a folder that Hyper-V and this user may write to")
        if {".", ".."} & set(self.export_to.split("\\")):
            raise ValueError("export_to: must not have the part . or ..")
        return self


FORM = Form(LiveKind.WMI_API, {"https": HTTPS_PORT, "http": HTTP_PORT}, Login, Options)
