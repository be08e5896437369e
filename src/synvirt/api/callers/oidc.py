"""Log-ins on the page by another service's accounts: OpenID Connect, the authorization code flow with PKCE.

    POST /login/oidc ─▶ Oidc.begin ─▶ the provider's page ─▶ GET /login/oidc/callback ─▶ Oidc.end ─▶ a session

A begun log-in is identified once by its state, for ten minutes, and by its browser (a cookie): so a link cannot log a person in
as another. A person without a role in the settings' table is refused. Blocking code.
"""

import base64
import hashlib
import hmac
import json
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlencode, urlsplit

import structlog
from starlette.requests import cookie_parser
from starlette.responses import Response

from synvirt.accounts import Role
from synvirt.api.callers.networks import network_of
from synvirt.errors import BadRequest, Forbidden, SynvirtError, Unauthorized
from synvirt.settings import Settings
from synvirt.settings.starting import client_secret
from synvirt.transport import Trust

if TYPE_CHECKING:
    from synvirt.api.callers.provider import Provider

# Identifies the browser; SameSite=Lax, as it comes back from the provider's site.
COOKIE: Final = "__Host-synvirt-oidc"
# Long enough to find a second factor.
BEGUN_FOR_S: Final = 600.0
# Begun log-ins come from unknown callers, so they are limited, for one caller and in all. The oldest is removed.
BEGUN_MAX, BEGUN_MAX_NETWORK = 1024, 16
# RFC 7636 section 4.1: 32 random bytes.
SECRET_BYTES: Final = 32
# The most characters of a code, and of a person's name.
CODE_CHARS_MAX, NAME_CHARS_MAX = 4096, 90
PREFIX: Final = "oidc:"
_AGAIN: Final = "log in again, from this service's page"

# The account, and the reason.
Refuse = Callable[[str, SynvirtError], None]

_log = structlog.get_logger("synvirt.api")


@dataclass(frozen=True, slots=True)
class Began:
    """`url`: where the browser goes. `browser`: what it stores meanwhile."""

    url: str
    browser: str


@dataclass(frozen=True, slots=True)
class Ended:
    """The person who has logged in by a provider, the role, and the page to continue with."""

    account: str
    role: Role
    following: str


@dataclass(frozen=True, slots=True)
class _Begun:
    browser: str
    nonce: str
    verifier: str
    following: str
    network: str
    at: float


class Oidc:
    """`roles`: by the names in the claim `roles_claim`. `label`: the provider's name on the page."""

    def __init__(
        self,
        provider: "Provider",
        *,
        redirect_uri: str,
        scopes: tuple[str, ...],
        roles_claim: str,
        roles: Mapping[str, Role],
        name_claim: str,
        label: str,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._provider, self._redirect_uri, self._scopes, self._clock = provider, redirect_uri, scopes, clock
        self._roles_claim, self._roles, self._name_claim, self.label = roles_claim, roles, name_claim, label
        self._lock = threading.Lock()
        self._begun: OrderedDict[str, _Begun] = OrderedDict()
        # A person who logged in under other settings has to log in again.
        rules = [provider.issuer, provider.client_id, roles_claim, sorted(roles.items())]
        self.grants = hashlib.sha256(json.dumps(rules).encode()).hexdigest()

    @property
    def ends(self) -> str:
        """The address for logging out of the provider itself; "", if none is known."""
        ends = self._provider.ends
        return (
            f"{ends}{'&' if urlsplit(ends).query else '?'}{urlencode({'client_id': self._provider.client_id})}" if ends else ""
        )

    def begin(self, address: str, following: str) -> Began:
        """Begins a log-in. SourceUnreachable, if the provider does not answer."""
        found = self._provider.found()
        state, browser, nonce, verifier = (secrets.token_urlsafe(SECRET_BYTES) for _ in range(4))
        begun = _Begun(_hashed(browser), nonce, verifier, following, network_of(address), self._clock())
        with self._lock:
            theirs = [key for key, one in self._begun.items() if one.network == begun.network]
            for key in theirs[: max(0, len(theirs) - BEGUN_MAX_NETWORK + 1)]:
                del self._begun[key]
            self._begun[_hashed(state)] = begun
            while len(self._begun) > BEGUN_MAX:
                self._begun.popitem(last=False)
        query = {
            "response_type": "code",
            "client_id": self._provider.client_id,
            "redirect_uri": self._redirect_uri,
            "scope": " ".join(self._scopes),
            "state": state,
            "nonce": nonce,
            "code_challenge": base64.urlsafe_b64encode(hashlib.sha256(verifier.encode()).digest()).rstrip(b"=").decode(),
            "code_challenge_method": "S256",
        }
        return Began(f"{found.authorize}{'&' if urlsplit(found.authorize).query else '?'}{urlencode(query)}", browser)

    def end(self, parameters: Mapping[str, str], browser: str, refuse: Refuse) -> Ended:
        """`parameters`: of the provider's redirection. Unauthorized, Forbidden (no role), SourceUnreachable; `refuse` gets each
        of these, with the person as far as known."""
        who = ""
        try:
            begun = self._known(parameters.get("state", ""), browser)
            claims = self._claims(parameters, begun)
            who = str(claims["sub"])
            role = self._role(claims)
            if role is None:
                raise Forbidden(
                    "the provider has identified you, but none of your groups has a role here",
                    hint=f"an admin can name a group of yours in the setting oidc_roles; the claim is {self._roles_claim}",
                )
        except SynvirtError as error:
            refuse(f"{PREFIX}{who}", error)
            raise
        account = PREFIX + self._name(claims)
        _log.info("logged in by the OpenID provider", account=account, subject=who, role=str(role))
        return Ended(account, role, begun.following)

    def _known(self, state: str, browser: str) -> _Begun:
        """The begun log-in, removed: right or wrong, it works only once."""
        with self._lock:
            begun = self._begun.pop(_hashed(state), None)
        if begun is None or not 0 <= self._clock() - begun.at < BEGUN_FOR_S:
            raise Unauthorized("this log-in was not started here, or has already ended", hint=_AGAIN)
        if not hmac.compare_digest(begun.browser, _hashed(browser)):
            raise Unauthorized("this log-in was started in another browser", hint=_AGAIN)
        return begun

    def _claims(self, parameters: Mapping[str, str], begun: _Begun) -> Mapping[str, Any]:
        if "error" in parameters:
            raise Unauthorized(f"the provider did not log you in: {parameters['error'][:100]!r}", hint=_AGAIN)
        # RFC 9207: an answer of another provider, whose code would be sent to the wrong one.
        issuer = parameters.get("iss", None if self._provider.found().names_itself else self._provider.issuer)
        if issuer != self._provider.issuer:
            raise Unauthorized("another provider answered", hint=_AGAIN)
        code = parameters.get("code", "")
        if not 0 < len(code) <= CODE_CHARS_MAX:
            raise Unauthorized("the provider's answer has no code", hint=_AGAIN)
        token = self._provider.redeem(code, begun.verifier, self._redirect_uri)
        return self._provider.claims(token, begun.nonce)

    def _role(self, claims: Mapping[str, Any]) -> Role | None:
        """The highest role of the names."""
        found = _claim(claims, self._roles_claim)
        names = [found] if isinstance(found, str) else found if isinstance(found, list) else []
        given = {self._roles[name] for name in names if isinstance(name, str) and name in self._roles}
        return next((role for role in reversed(Role) if role in given), None)

    def _name(self, claims: Mapping[str, Any]) -> str:
        name = _claim(claims, self._name_claim)
        usable = isinstance(name, str) and name.strip() and name.isprintable() and len(name) <= NAME_CHARS_MAX
        return name.strip() if usable and isinstance(name, str) else str(claims["sub"])[:NAME_CHARS_MAX]


def oidc(settings: Settings) -> Oidc | None:
    """The provider of the settings; None, if they name no issuer. BadRequest, if a needed setting is missing."""
    if not settings.oidc_issuer:
        return None
    # Imported only here: it costs memory, and few services have a provider.
    from synvirt.api.callers.provider import Provider

    settings.check_oidc()

    def secret() -> str:
        try:
            return client_secret(settings)
        except PermissionError as error:
            raise BadRequest(
                f"setting oidc_client_secret_file: {error.filename} cannot be read: {error.strerror}",
                hint="the service's user must be able to read it",
            ) from error

    secret()
    digits = settings.oidc_fingerprint_sha256.replace(":", "").upper()
    pin = ":".join(digits[at : at + 2] for at in range(0, len(digits), 2)) or None
    trust = Trust(fingerprint_sha256=pin)
    return Oidc(
        Provider(settings.oidc_issuer, settings.oidc_client_id, secret=secret, trust=trust),
        redirect_uri=settings.oidc_redirect_uri,
        scopes=settings.oidc_scopes,
        roles_claim=settings.oidc_roles_claim,
        roles={name: Role(role) for name, role in settings.oidc_roles.items()},
        name_claim=settings.oidc_name_claim,
        label=settings.oidc_label or urlsplit(settings.oidc_issuer).hostname or "",
    )


def browser_in(cookie_header: str) -> str:
    return cookie_parser(cookie_header).get(COOKIE, "")


def give_browser(response: Response, secret: str) -> None:
    """Sets the cookie that ties a log-in to the browser that began it."""
    response.set_cookie(COOKIE, secret, max_age=int(BEGUN_FOR_S), path="/", secure=True, httponly=True, samesite="lax")


def take_browser(response: Response) -> None:
    """Removes that cookie."""
    response.delete_cookie(COOKIE, path="/", secure=True, httponly=True, samesite="lax")


def _claim(claims: Mapping[str, Any], name: str) -> Any:
    """The claim by its whole name, else by its parts: realm_access.roles is one within another."""
    if name in claims:
        return claims[name]
    found: Any = claims
    for part in name.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found


def _hashed(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "replace")).hexdigest()
