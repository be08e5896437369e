"""Other libvirt hosts. Registered and not served yet."""

from pydantic import SecretStr

from synvirt.live import SourceAccess
from synvirt.live.form import Form
from synvirt.live.planned import Planned
from synvirt.model import LiveKind, Name, Received, SourceOptions

COMING = "full and incremental backups by libvirt are to come"


class Login(Received):
    """Nothing for a local URI; for SSH a key or a password; for TLS certificates; `user` and `password` for SASL."""

    user: Name | None = None
    password: SecretStr | None = None


FORM = Form(
    LiveKind.LIBVIRT_REMOTE,
    {"qemu+ssh": 22, "qemu+tls": 16514, "qemu+tcp": 16509, "qemu": None},
    Login,
    SourceOptions,
    user_in_endpoint=True,
)


def libvirt_remote(access: SourceAccess) -> Planned:
    return Planned(access, FORM, COMING)
