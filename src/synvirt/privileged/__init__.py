"""What only root may do, and the service is not: asked of a helper, or done in this process where that is root's own.

    Privileged ─▶ Here        in this process: a first try, `make run`, a service of root's
               └▶ ByHelper ─▶ Unix socket ─▶ helper.py (root, one process a call) ─▶ PAM

`main/` chooses. What the helper takes from a caller it checks itself, by root's own settings file; it imports nothing of ours
beside this room. zfs checks what its delegated rights allow, libvirtd who may connect to it: neither needs the helper.
"""

from typing import Protocol


class Privileged(Protocol):
    """Blocking; safe from several threads.

    - `authenticate(user, password)`: whether PAM takes them, and the account may be used. Internal, where it cannot be asked.
    """

    def authenticate(self, user: str, password: str) -> bool: ...
