"""The role that a request needs: a table of paths. Viewers read, and operators change, what it does not name."""

import re
from typing import Final

from synvirt.accounts import Role

_READING: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_ANY: Final = None

# First match wins: methods (None: all), a path under {base_url} (API and pages alike), the role. An id is `*`.
RULES: Final[tuple[tuple[frozenset[str] | None, str, Role], ...]] = (
    # Accounts, their tokens, and who did what.
    (_ANY, "/api/v1/(tokens|audit)(/.*)?|/audit(/.*)?", Role.ADMIN),
    # Keys, and what opens every backup.
    (_ANY, "/api/v1/migrator/keyring(/.*)?", Role.ADMIN),
    (_ANY, "/api/v1/backup/repositories/[^/]+/recovery-key", Role.ADMIN),
    (_ANY, "/backups/repositories/[^/]+/key", Role.ADMIN),
    # Operators may make requests to a platform and test whether it answers; stored credentials are used.
    (frozenset({"POST"}), "(/api/v1/migrator)?/sources/[^/]+/(test|deep)", Role.OPERATOR),
    (frozenset({"GET"}), "/api/v1/migrator/sources/[^/]+/vms(/.*)?", Role.OPERATOR),
    (frozenset({"GET"}), "/new/(machine|source|several)(/.*)?", Role.OPERATOR),
    # Logging in and out.
    (frozenset({"POST"}), "/(login(/oidc)?|logout)", Role.VIEWER),
    # Sources, repositories, hosts: they hold credentials or decide where data goes.
    (frozenset({"POST", "PUT", "PATCH", "DELETE"}), "(/api/v1/migrator)?/sources(/.*)?", Role.ADMIN),
    (frozenset({"POST", "PUT", "PATCH", "DELETE"}), "/api/v1/migrator/hosts(/.*)?", Role.ADMIN),
    (frozenset({"POST"}), "(/api/v1/backup|/backups)/repositories/[^/]+/verify", Role.OPERATOR),
    (frozenset({"POST", "PUT", "PATCH", "DELETE"}), "(/api/v1/backup|/backups)/repositories(/.*)?", Role.ADMIN),
    # Removing. Operators may remove uploads.
    (frozenset({"DELETE"}), "/api/v1/migrator/uploads/[^/]+", Role.OPERATOR),
    (frozenset({"DELETE"}), "/.*", Role.ADMIN),
    (frozenset({"POST"}), "/api/v1/backup/jobs/[^/]+/retention", Role.ADMIN),
    (frozenset({"POST"}), "/backups/offers/[^/]+/points/[^/]+/release", Role.ADMIN),
    (frozenset({"POST"}), "/backups/(jobs|points)/[^/]+/(remove|retire|let-go)", Role.ADMIN),
    (frozenset({"POST"}), "/(migrations|waves|windows)/[^/]+/(remove|destroy)|/migrations/[^/]+/fence", Role.ADMIN),
    (frozenset({"PATCH"}), "/api/v1/backup/restore-points/[^/]+", Role.ADMIN),  # its protection
)
# No path has these. A route's pattern ends with `$`, which in Python also matches before a newline at the end: a path with one
# would reach its route, and match none of the rules above.
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")
_COMPILED: Final = tuple((methods, re.compile(path), role) for methods, path, role in RULES)
# The GETs that make the service connect elsewhere: another site's page must not cause that, whatever the browser knows. They
# list a source's machines, and show a repository, which may be on a peer: in the API, whose clients know them as GETs, and on
# the pages. tests/api/callers/test_roles.py calls every GET, and checks that these are all.
CONNECTING: Final = re.compile(
    r"/api/v1/migrator/sources/[^/]+/vms(/.*)?|/new/(machine|source|several)(/.*)?"
    r"|(/api/v1/backup|/backups)/repositories(/[^/]+)?"
)

# The one GET that shows a secret, which opens every backup: the audit trail records its readers. The page uses POST for it.
KEYS: Final = re.compile("/api/v1/backup/repositories/[^/]+/recovery-key")


def is_path(text: str) -> bool:
    """Whether the text of a request may be a path of ours. All others must be refused before they are looked at."""
    return _CONTROL.search(text) is None


def shows_key(path: str) -> bool:
    return KEYS.fullmatch(path) is not None


def needed_role(method: str, path: str) -> Role:
    """`path`: under {base_url}. What is no path needs the highest role."""
    if not is_path(path):
        return Role.ADMIN
    method = "GET" if method == "HEAD" else method
    for methods, pattern, role in _COMPILED:
        if (methods is None or method in methods) and pattern.fullmatch(path):
            return role
    return Role.VIEWER if method in _READING else Role.OPERATOR


def connects_out(path: str) -> bool:
    return CONNECTING.fullmatch(path) is not None
