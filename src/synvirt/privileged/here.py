"""In this process."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Here:
    """Asks PAM in this process, by the service `pam_service`."""

    pam_service: str = "login"

    def authenticate(self, user: str, password: str) -> bool:
        import pamela

        try:
            pamela.authenticate(user, password, service=self.pam_service, resetcred=0)
        except (pamela.PAMError, ValueError):  # a text that is no UTF-8, or has a NUL, is no password
            return False
        return True
