"""An OpenID provider: its description of itself, and the persons that it has logged in. Blocking code.

    found()     where to send a browser        OpenID Connect Discovery 1.0
    redeem()    a code for an ID token         RFC 6749 section 4.1.3, RFC 7636 (PKCE)
    claims()    the token's content, checked   OpenID Connect Core 1.0 section 3.1.3.7

The guard checks each connection, like those to sources: `source_allowed_hosts` applies to a provider, too.
"""

import base64
import hmac
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote_plus, urlsplit

from joserfc import jwt
from joserfc.errors import BadSignatureError, InvalidKeyIdError, JoseError
from joserfc.jwk import KeySet

from synvirt.errors import SourceUnreachable, Unauthorized
from synvirt.transport import Answer, HttpClient, Trust

# Its description and its keys are kept for this long; an unknown key is looked up at most once a minute.
FOUND_FOR_S: Final = 3600.0
KEYS_AGAIN_S: Final = 60.0
# A person waits for it.
TIMEOUT_S: Final = 10.0
# For one answer: the largest known set of keys has some 20 KiB.
ANSWER_BYTES_MAX: Final = 1 << 20
TOKEN_CHARS_MAX: Final = 64 << 10
# The most that two clocks may differ.
LEEWAY_S: Final = 60.0
# A token is made when the code is redeemed: an older one belongs to another log-in.
TOKEN_AGE_S: Final = 600.0
# The year 5138.
MOMENT_MAX: Final = 1e11
# Only with a key whose public part is published: no `none`, and no shared secret (RFC 8725 section 3.1, 3.2).
ALGORITHMS: Final = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA", "Ed25519")
_PUBLIC: Final = frozenset({"RSA", "EC", "OKP"})
_HINT: Final = "the provider's own log may say more; this service's settings begin with oidc_"


@dataclass(frozen=True, slots=True)
class Found:
    """A provider's description of itself. `ends`: the address for logging out of it, "" if there is none. `names_itself`: each
    of its answers names it (RFC 9207)."""

    authorize: str
    token: str
    keys: str
    ends: str
    by_post: bool
    names_itself: bool


class Provider:
    """`secret`: reads the client's, "" for none. `trust`: this host's certificate authorities, or a pin."""

    def __init__(
        self,
        issuer: str,
        client_id: str,
        *,
        secret: Callable[[], str],
        trust: Trust,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.issuer, self.client_id = issuer, client_id
        self._secret, self._trust, self._clock = secret, trust, clock
        self._lock = threading.Lock()
        self._found: tuple[float, Found] | None = None
        self._keys: tuple[float, KeySet] | None = None

    def found(self) -> Found:
        """The provider's description. SourceUnreachable, if it does not answer, or the description is invalid."""
        known = self._found
        if known is not None and known[0] <= self._clock() < known[0] + FOUND_FOR_S:
            return known[1]
        metadata = self._asked(f"{self.issuer.rstrip('/')}/.well-known/openid-configuration")
        if metadata.get("issuer") != self.issuer:  # Discovery, section 4.3
            raise _odd(f"it names itself {str(metadata.get('issuer'))[:200]!r}, and oidc_issuer is {self.issuer!r}")
        methods = metadata.get("token_endpoint_auth_methods_supported") or ["client_secret_basic"]
        found = Found(
            authorize=_address(metadata, "authorization_endpoint"),
            token=_address(metadata, "token_endpoint"),
            keys=_address(metadata, "jwks_uri"),
            ends=_address(metadata, "end_session_endpoint") if metadata.get("end_session_endpoint") else "",
            by_post="client_secret_basic" not in methods and "client_secret_post" in methods,
            names_itself=metadata.get("authorization_response_iss_parameter_supported") is True,
        )
        self._found = (self._clock(), found)
        return found

    @property
    def ends(self) -> str:
        """As in `Found`, if it is known already: it makes no request."""
        return "" if self._found is None else self._found[1].ends

    def redeem(self, code: str, verifier: str, redirect_uri: str) -> str:
        """The ID token, not checked yet. Unauthorized, if the provider refuses the code."""
        found, secret = self.found(), self._secret()
        form = {"grant_type": "authorization_code", "code": code, "redirect_uri": redirect_uri, "code_verifier": verifier}
        headers = {"accept": "application/json"}
        if secret and not found.by_post:
            # RFC 6749, section 2.3.1: each is first encoded like a form's field.
            pair = f"{quote_plus(self.client_id)}:{quote_plus(secret)}"
            headers["authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
        else:
            form |= {"client_id": self.client_id} | ({"client_secret": secret} if secret else {})
        answer = self._request("POST", found.token, form=form, headers=headers)
        fields = answer.json() if answer.status in (200, 400, 401) else {}
        fields = fields if isinstance(fields, dict) else {}
        if not answer.ok:
            why = str(fields.get("error", ""))[:100]
            raise Unauthorized(f"the provider did not exchange the code: status {answer.status} {why}".rstrip(), hint=_HINT)
        token = fields.get("id_token")
        if not isinstance(token, str) or len(token) > TOKEN_CHARS_MAX:
            raise Unauthorized("the provider sent no ID token", hint="does this client have the scope openid there?")
        return token

    def claims(self, token: str, nonce: str) -> Mapping[str, Any]:
        """The claims of a token that this provider signed, for us, now, for the log-in with this nonce. Else Unauthorized."""
        claims = self._signed(token)
        at, audience = self._clock(), claims.get("aud")
        audiences = audience if isinstance(audience, list) else [audience]
        wrong = (
            ("it is by another issuer", claims.get("iss") != self.issuer),
            ("it is for another client", self.client_id not in audiences),
            ("it is for another client", claims.get("azp", self.client_id if len(audiences) == 1 else None) != self.client_id),
            ("it has expired", at >= _moment(claims, "exp") + LEEWAY_S),
            ("it is of another time", not -LEEWAY_S <= at - _moment(claims, "iat") <= TOKEN_AGE_S),
            ("it is not valid yet", "nbf" in claims and at < _moment(claims, "nbf") - LEEWAY_S),
            (
                "it is for another log-in",
                not hmac.compare_digest(str(claims.get("nonce", "")).encode("utf-8", "replace"), nonce.encode()),
            ),
            ("it does not name the user", not _is_name(claims.get("sub"))),
        )
        for why, is_so in wrong:
            if is_so:
                raise Unauthorized(f"the provider's ID token is refused: {why}", hint=_HINT)
        return claims

    def _signed(self, token: str) -> dict[str, Any]:
        try:
            try:
                return jwt.decode(token, self._key_set(), algorithms=ALGORITHMS).claims
            except (InvalidKeyIdError, BadSignatureError):  # it may have a new key; one that is alone needs no id
                return jwt.decode(token, self._key_set(again_after_s=KEYS_AGAIN_S), algorithms=ALGORITHMS).claims
        except (JoseError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise Unauthorized(
                f"the provider's ID token is refused: {str(error) or type(error).__name__}"[:300], hint=_HINT
            ) from error

    def _key_set(self, again_after_s: float = FOUND_FOR_S) -> KeySet:
        with self._lock:
            known = self._keys
            if known is None or not known[0] <= self._clock() < known[0] + again_after_s:
                document = self._asked(self.found().keys)
                try:
                    usable = [key for key in document["keys"] if key.get("kty") in _PUBLIC and key.get("use", "sig") == "sig"]
                    known = (self._clock(), KeySet.import_key_set({"keys": usable}))
                except (JoseError, ValueError, TypeError, KeyError, AttributeError) as error:
                    raise _odd("its keys cannot be read") from error
                self._keys = known
            return known[1]

    def _asked(self, url: str) -> dict[str, Any]:
        answer = self._request("GET", url, headers={"accept": "application/json"})
        document = answer.json() if answer.ok else None
        if not isinstance(document, dict):
            raise _odd(f"{url} answers with status {answer.status}")
        return document

    def _request(self, method: str, url: str, **sent: Any) -> Answer:
        parts = urlsplit(url)
        client = HttpClient(f"{parts.scheme}://{parts.netloc}", self._trust, connections=1, timeout_s=TIMEOUT_S)
        try:
            path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            return client.request(method, path, limit_bytes=ANSWER_BYTES_MAX, **sent)
        finally:
            client.close()


def _address(metadata: Mapping[str, Any], name: str) -> str:
    """A request there may carry a log-in: never without encryption."""
    url = metadata.get(name)
    try:
        if isinstance(url, str) and len(url) <= 2000 and url.isascii() and url.isprintable():
            parts = urlsplit(url)
            if parts.scheme == "https" and parts.hostname and parts.username is None and not parts.fragment:
                return url
    except ValueError:
        pass
    raise _odd(f"its {name} is not an https:// address")


def _is_name(subject: object) -> bool:
    """Section 2: at most 255 characters of ASCII. Any that can be shown are taken."""
    return isinstance(subject, str) and 0 < len(subject) <= 255 and subject.isprintable()


def _moment(claims: Mapping[str, Any], name: str) -> float:
    value = claims.get(name)
    # Python reads NaN and numbers of any length as JSON, and NaN is never later than another number.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < MOMENT_MAX:
        raise Unauthorized(f"the provider's ID token is refused: its {name} is not a time", hint=_HINT)
    return float(value)


def _odd(why: str) -> SourceUnreachable:
    return SourceUnreachable(f"the OpenID provider cannot be used: {why}", hint="is the setting oidc_issuer right?")
