"""Whether a password is right, asked of PAM in this process."""

import logging
from dataclasses import dataclass

_log = logging.getLogger("synvirt.privileged")
# Linux-PAM's numbers (security/_pam_types.h) for an account whose password was right: it must be changed, the account has
# expired, the password has. Some hosts' rules answer the second like a wrong password.
_EXPIRED = frozenset({12, 13, 27})


@dataclass(frozen=True, slots=True)
class Here:
    """Asks PAM in this process, by the service `pam_service`."""

    pam_service: str = "login"

    def authenticate(self, user: str, password: str) -> bool:
        import pamela

        try:
            pamela.authenticate(user, password, service=self.pam_service, resetcred=0)
        except ValueError:  # a text that is no UTF-8, or has a NUL, is no password
            return False
        except pamela.PAMError as error:
            # The caller learns as little as of a wrong password; who keeps the host must know.
            if error.errno in _EXPIRED:
                _log.warning("the password of %s was right, and PAM refuses the account: %s", user, error.message)
            return False
        return True
