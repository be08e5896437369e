"""vSphere: vCenter and ESXi, by the vSphere Web Services API on port 443."""

from pydantic import SecretStr

from synvirt.live import SourceAccess
from synvirt.live.form import Form
from synvirt.live.planned import Planned
from synvirt.model import LiveKind, Name, Received, SourceOptions

COMING = "the control plane is to come in v0.2"


class Login(Received):
    user: Name
    password: SecretStr


FORM = Form(LiveKind.VIM_API, {"https": 443}, Login, SourceOptions)


def vim_api(access: SourceAccess) -> Planned:
    return Planned(access, FORM, COMING)
