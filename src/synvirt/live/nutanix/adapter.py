"""Nutanix AHV clusters, by Prism Central or Element on port 9440. Registered and not served yet: docs/platforms/nutanix.md."""

from pydantic import SecretStr

from synvirt.live import SourceAccess
from synvirt.live.form import Form
from synvirt.live.planned import Planned
from synvirt.model import LiveKind, Name, Received, SourceOptions

COMING = "its recovery points and their changed regions, by Prism, are to come"


class Login(Received):
    user: Name
    password: SecretStr


FORM = Form(LiveKind.PRISM_API, {"https": 9440}, Login, SourceOptions)


def prism_api(access: SourceAccess) -> Planned:
    return Planned(access, FORM, COMING)
