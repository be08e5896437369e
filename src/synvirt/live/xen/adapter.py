"""XenServer and XCP-ng pools, by XAPI on port 443. Registered and not served yet: docs/platforms/xenserver.md."""

from pydantic import SecretStr

from synvirt.live import SourceAccess
from synvirt.live.form import Form
from synvirt.live.planned import Planned
from synvirt.model import LiveKind, Name, Received, SourceOptions

COMING = "its changed blocks and NBD exports, by XAPI, are to come"


class Login(Received):
    user: Name
    password: SecretStr


FORM = Form(LiveKind.XEN_API, {"https": 443}, Login, SourceOptions)


def xen_api(access: SourceAccess) -> Planned:
    return Planned(access, FORM, COMING)
