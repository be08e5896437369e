"""The helper as the service asks it: a connection a call, a message each way."""

import json
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from synvirt.errors import Internal

# PAM's own pause after a wrong password is some 3 s, and a directory that it asks may be slow.
ANSWERS_WITHIN_S = 60.0
ANSWER_BYTES_MAX = 4096
_HINT = "systemctl status synvirt-helper.socket, journalctl -u 'synvirt-helper@*'"


@dataclass(frozen=True, slots=True)
class ByHelper:
    """Asks root's helper, over its Unix socket at `path`. `within_s`: for how long an answer is waited for."""

    path: Path
    within_s: float = ANSWERS_WITHIN_S

    def authenticate(self, user: str, password: str) -> bool:
        return bool(self._ask({"call": "authenticate", "user": user, "password": password}).get("right"))

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as connection:
                connection.settimeout(self.within_s)
                connection.connect(str(self.path))
                connection.send(json.dumps(request).encode())
                answer = connection.recv(ANSWER_BYTES_MAX)
        except OSError as error:
            raise Internal(f"root's helper does not answer: {error.strerror or error}", hint=_HINT) from error
        try:
            found = json.loads(answer)
        except ValueError as error:  # nothing, too: it was ended, or takes no more calls at once
            raise Internal("root's helper ended without an answer", hint=_HINT) from error
        if not isinstance(found, dict) or "error" in found:
            reason = found.get("error") if isinstance(found, dict) else "an answer that is none"
            raise Internal(f"root's helper refused the call: {reason}", hint=_HINT)
        return found
