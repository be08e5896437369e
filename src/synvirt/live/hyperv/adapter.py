"""Hyper-V hosts and clusters, by WinRM (MS-WSMV) on port 5986. Registered and not served yet: docs/platforms/hyper-v.md."""

from pydantic import SecretStr

from synvirt.live import SourceAccess
from synvirt.live.form import Form
from synvirt.live.planned import Planned
from synvirt.model import LiveKind, Name, Received, SourceOptions

COMING = "its checkpoints and their disks, by WinRM and SMB, are to come"


class Login(Received):
    """A local user, `DOMAIN\\user` or `user@domain`."""

    user: Name
    password: SecretStr


FORM = Form(LiveKind.WMI_API, {"https": 5986, "http": 5985}, Login, SourceOptions)


def wmi_api(access: SourceAccess) -> Planned:
    return Planned(access, FORM, COMING)
