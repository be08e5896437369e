"""What our user may do, as far as a Prism shows it: its role by name, and the lists that it may not see. Blocking code.

    users (v4 iam): our name ─▶ its id ─▶ authorization policies with it ─▶ their roles, by name

This does not find a role from a directory's group, and Prism Element shows no user's own role: the check says both.
"""

from collections.abc import Iterator
from typing import Any, Final

from synvirt.errors import AuthFailed, SourceUnreachable
from synvirt.live.nutanix.central import Central
from synvirt.live.nutanix.prism import Absent, Refused, dig, text
from synvirt.model.sources import SourceCheck

# The roles of every Prism Central that have all rights that we need.
ENOUGH: Final = frozenset({"Super Admin", "Internal Super Admin", "Prism Admin", "Cluster Admin"})
HINT: Final = "give it the role Prism Admin or Cluster Admin, for all entities of the cluster"
# (name, namespace, path) of the lists that a move of a VM needs.
SEEN: Final = (
    ("clusters", "clustermgmt", "config/clusters"),
    ("storage containers", "clustermgmt", "config/storage-containers"),
    ("subnets", "networking", "config/subnets"),
    ("images", "vmm", "content/images"),
    ("tasks", "prism", "config/tasks"),
    ("recovery points", "dataprotection", "config/recovery-points"),
    ("volume groups", "volumes", "config/volume-groups"),
)
# Filters of identities are nested, but never deep.
_DEPTH_MAX: Final = 8


def of_central(central: Central, user: str) -> Iterator[SourceCheck]:
    """One check for each list that we may not see, then one for the role."""
    for name, namespace, rest in SEEN:
        try:
            query = {"$page": "0", "$limit": "1"}
            central.prism.ask("GET", central.path(namespace, rest), query=query, what=f"show its {name}")
        except Absent:
            continue  # an older one, without them: the ways that need them report it
        except AuthFailed as error:
            yield SourceCheck(name=f"privilege: see {name}", ok=False, detail=error.detail, hint=HINT)
    yield _role(central, user)


def _role(central: Central, user: str) -> SourceCheck:
    try:
        names = roles(central, user)
    except (AuthFailed, Refused, SourceUnreachable) as error:
        detail = f"{central.host} does not show the role of {user}: {error.detail}"
        return SourceCheck(name="role", ok=True, warning=True, detail=detail, hint=HINT)
    if not names:
        detail = f"no authorization policy names {user}: its role, if any, comes by a group"
        return SourceCheck(name="role", ok=True, warning=True, detail=detail, hint=HINT)
    detail = f"{user} has the role {', '.join(names)}"
    if ENOUGH & set(names):
        return SourceCheck(name="role", ok=True, detail=detail)
    if all(name.endswith("Viewer") for name in names):
        return SourceCheck(name="role", ok=False, detail=f"{detail}, which may change nothing", hint=HINT)
    return SourceCheck(name="role", ok=True, warning=True, detail=f"{detail}, of which nothing is known here", hint=HINT)


def roles(central: Central, user: str) -> list[str]:
    """From the policies that name this user itself."""
    wanted = user.replace("'", "''")
    users = central.all("iam", "authn/users", "list users", filter=f"username eq '{wanted}'")
    ids = {text(one, "extId") for one in users if text(one, "username").lower() == user.lower()}
    policies = central.all("iam", "authz/authorization-policies", "list authorization policies")
    held = {text(one, "role") for one in policies if ids & set(_named(one.get("identities")))}
    if not held:
        return []
    found = central.all("iam", "authz/roles", "list roles")
    return sorted(text(one, "displayName") for one in found if text(one, "extId") in held)


def _named(identities: Any) -> Iterator[str]:
    """The users' ids in filters of identities: `{"identityFilter": {"user": {"uuid": {"anyof": [ID]}}}}`."""

    def texts(thing: Any, depth: int) -> Iterator[str]:
        if isinstance(thing, str):
            yield thing
        elif depth < _DEPTH_MAX and isinstance(thing, (list, dict)):
            for one in thing.values() if isinstance(thing, dict) else thing:
                yield from texts(one, depth + 1)

    for one in identities if isinstance(identities, list) else ():
        yield from texts(dig(one, "identityFilter", "user"), 0)
