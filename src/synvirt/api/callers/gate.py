"""The gate: every path needs credentials, except the few in this file; callers of the Unix socket need none.

Credentials are HTTP Basic, a token, or the cookie of a session. The page's log-in gives a session, by a password or by an
OpenID provider; a browser without credentials is sent there.

A new route needs credentials by default, because only exceptions are listed.
"""

import base64
import binascii
import contextlib
import ipaddress
import math
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from http import HTTPStatus
from types import MappingProxyType
from typing import Protocol, TypeVarTuple
from urllib.parse import quote, urlsplit

from anyio import CapacityLimiter, to_thread
from starlette.datastructures import Headers
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from synvirt.accounts import WRONG, Role
from synvirt.acting import Act, acting
from synvirt.api.callers.coming import BASIC, OIDC, PAGE, TOKEN, Caller, Coming, shown_account
from synvirt.api.callers.oidc import Began, Oidc, browser_in
from synvirt.api.callers.origin import READING
from synvirt.api.callers.roles import is_path
from synvirt.api.callers.sessions import Login, Sessions, secret_in
from synvirt.api.callers.staying import staying
from synvirt.api.problems import answered, of_its_side, problem
from synvirt.errors import BadRequest, Forbidden, NotFound, SynvirtError, Unauthorized
from synvirt.store.access import Token


class Authenticate(Protocol):
    """Checks callers. `address`: the caller's; "" is the Unix socket's."""

    def remembers(self, user: str, password: str) -> bool:
        """Whether this was right a moment ago. At once: it is called in the event loop, for each request."""
        ...

    def check(self, user: str, password: str, address: str) -> None:
        """Unauthorized, if it is wrong. Blocking, and slow on purpose: it is called in a thread."""
        ...

    @property
    def role_of(self) -> Callable[[str], Role]:
        """The role of an account whose password was right. Forbidden, if it has none. Blocking, and quick."""
        ...

    @property
    def version(self) -> Callable[[], object]:
        """Changes when the accounts may have changed. At once."""
        ...


# The facts that are noted of a caller.
Arguments = TypeVarTuple("Arguments")
# A token, by its secret; None: there is no such token. Blocking.
FindToken = Callable[[str], Token | None]


# Each takes a core and 16 MiB (scrypt), or seconds (PAM, for a wrong one). They have their own threads: however many strangers
# guess, known callers and the endpoints' threads do not wait for them.
CHECKS_AT_ONCE = 4
# The same for calls to an OpenID provider, which may not answer.
PROVIDER_AT_ONCE = 4
# Tokens are looked up, and log-ins noted, in the store: that is quick, and no guess of a stranger's holds it up.
STORE_AT_ONCE = 4
# For load balancers and client generators: neither shows anything about this host. A caller that sends credentials there all
# the same is authenticated (`KNOWN`), and may see more.
OPEN_PATHS = frozenset({"/healthz", "/openapi.json"})
# The page's, under {base_url}.
LOGIN_PATHS = ("/login", "/login/oidc", "/login/oidc/callback")
# A longer text is no password: PAM and scrypt would read all of it.
CREDENTIALS_CHARS_MAX = 2048
# Set by the server on the Unix socket, in the scope: a caller cannot send it.
LOCAL = "synvirt.local"
# What its callers are called.
LOCAL_ACCOUNT = "local"
# Set by the gate: that the caller is authenticated, and its identity.
KNOWN, CALLER = "synvirt.known", "synvirt.caller"
# The gate itself, for the page's log-in.
DOOR = "synvirt.door"
# What a browser is told that has no session: a form's answer, and a script's.
ENDED = "nobody is logged in here any more, and nothing was done with what was sent"
SEND_AGAIN = "log in in another tab, then reload this page: the browser still has what was typed, and sends it again"
TRY_AGAIN = "log in in another tab, then try again here"
TOKEN_PREFIX = "svt_"  # noqa: S105 - the beginning of every token, not a token


class TooManyAttempts(Unauthorized):
    """Nothing is checked for `wait_s` seconds."""

    def __init__(self, detail: str, *, wait_s: float) -> None:
        super().__init__(detail, hint=f"try again in {wait_s:.0f} s")
        self.wait_s = wait_s


class Gate:
    """`confined`: accounts that may call only these paths. `needed`: the role that a method and a path under {base_url} need.
    `proxies`: networks whose X-Forwarded-For is trusted."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        authenticate: Authenticate,
        confined: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
        base_url: str = "",
        needed: Callable[[str, str], Role] = lambda method, path: Role.VIEWER,
        find_token: FindToken = lambda secret: None,
        coming: Coming | None = None,
        proxies: tuple[str, ...] = (),
        sessions: Sessions | None = None,
        oidc: Oidc | None = None,
    ) -> None:
        self._app, self._authenticate = app, authenticate
        self._base_url, self._needed, self._find_token = base_url, needed, find_token
        self._proxies = tuple(ipaddress.ip_network(proxy, strict=False) for proxy in proxies)
        # The host may accept any spelling of an account's name.
        self._confined = {user.casefold(): paths for user, paths in confined.items()}
        self._limiter, self._store_limiter = CapacityLimiter(CHECKS_AT_ONCE), CapacityLimiter(STORE_AT_ONCE)
        self._coming = coming or Coming(lambda entry: None)
        self._sessions = sessions or Sessions(authenticate.version)
        self.oidc, self._provider_limiter = oidc, CapacityLimiter(PROVIDER_AT_ONCE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] == "http" and not is_path(scope["path"]):
            await answered(scope, NotFound("a path has no control characters"))(scope, receive, send)
            return
        scope[KNOWN], scope[DOOR] = bool(scope.get(LOCAL)), self
        if scope.get(LOCAL):
            scope[CALLER] = Caller(LOCAL_ACCOUNT, Role.ADMIN)
        elif scope["type"] == "http" and self._is_asked(scope):
            try:
                scope[CALLER] = await self._admit(scope)
                await self._permit(scope[CALLER], scope)
            except (Unauthorized, Forbidden) as error:
                with _acting_for(scope.get(CALLER)):
                    refusal = self._refusal(scope, error)
                await refusal(scope, receive, send)
                return
            scope[KNOWN] = True
        with _acting_for(scope.get(CALLER)):
            if scope[KNOWN] and not scope.get(LOCAL):
                await staying(self._app, scope, receive, send, partial(self._refused_now, scope))
            else:
                await self._app(scope, receive, send)

    async def _refused_now(self, scope: Scope) -> SynvirtError | None:
        """Why the caller of a stream is not admitted any more; None: it is. No audit entry: who comes again is refused."""
        try:
            _, _, finding = self._finding(scope)
            caller = await finding
        except TooManyAttempts:  # of others, at this account or network: nothing was checked
            return None
        except (Unauthorized, Forbidden) as error:
            return error
        except SynvirtError:  # the store or the host's accounts are away: nothing was checked
            return None
        return self._lacks(caller, scope)

    async def _admit(self, scope: Scope) -> Caller:
        address = self._address(scope)
        user, way, finding = self._finding(scope)
        try:
            caller = await finding
        except (Unauthorized, Forbidden) as error:
            if way:
                await self._noted(self._coming.refuse, user, address, way, error)
            raise
        if way and self._coming.is_new(caller.account, address, way):
            await self._noted(self._coming.came, caller, way)
        return caller

    def _finding(self, scope: Scope) -> tuple[str, str, Coroutine[None, None, Caller]]:
        """The account that a request names, the way of its log-in ("": a session, which is noted at its beginning), and what
        finds its caller. Unauthorized, if it sends no credentials."""
        headers, address = Headers(scope=scope), self._address(scope)
        header = headers.get("authorization")
        login = None if header is not None else self._sessions.of(secret_in(headers.get("cookie", "")))
        if login is not None:
            return login.account, "", self._by_session(login, address)
        if header is not None and header.lower().startswith("bearer "):
            return "", TOKEN, self._by_token(header[7:].strip(), address)
        user, password = _credentials(header)
        return user, BASIC, self._by_password(user, password, address, scope)

    async def _by_session(self, login: Login, address: str) -> Caller:
        role = login.role if login.role is not None else await to_thread.run_sync(self._authenticate.role_of, login.account)
        return Caller(login.account, role, address, by_session=True)

    async def _by_password(self, user: str, password: str, address: str, scope: Scope) -> Caller:
        if not self._authenticate.remembers(user, password):
            await to_thread.run_sync(self._authenticate.check, user, password, address, limiter=self._limiter)
        if user.strip().casefold() in self._confined:
            self._confine(user, scope)
            return Caller(user, Role.VIEWER, address, confined=True)
        return Caller(user, await to_thread.run_sync(self._authenticate.role_of, user), address)

    async def _permit(self, caller: Caller, scope: Scope) -> None:
        """Forbidden, if it needs another role; an attempt to change something is in the audit trail."""
        error = self._lacks(caller, scope)
        if error is None:
            return
        if scope["method"] not in READING:
            await self._noted(self._coming.denied, caller, scope["method"], scope["path"], error)
        raise error

    def _lacks(self, caller: Caller, scope: Scope) -> Forbidden | None:
        """Says which role the caller would need; None: its own reaches."""
        if scope["path"] in OPEN_PATHS or caller.confined:
            return None
        needed = self._needed(scope["method"], scope["path"].removeprefix(self._base_url))
        if caller.role.reaches(needed):
            return None
        return Forbidden(
            f"this needs the role {needed}, and {caller.account} has the role {caller.role}",
            hint="ask an admin of this service",
        )

    async def _noted(self, note: Callable[[*Arguments], None], *arguments: *Arguments) -> None:
        """Notes it before the answer, as it might never be noted afterwards."""
        await to_thread.run_sync(note, *arguments, limiter=self._store_limiter)

    async def log_in(self, scope: Scope, user: str, password: str) -> str:
        """The secret of a new session, for a cookie. Unauthorized, Forbidden."""
        address = self._address(scope)
        try:
            role = await self._person(user, password, address)
        except (Unauthorized, Forbidden) as error:
            await self._noted(self._coming.refuse, user, address, PAGE, error)
            raise
        await self._noted(self._coming.came, Caller(user, role, address), PAGE)
        return await to_thread.run_sync(self._sessions.begin, user)

    async def _person(self, user: str, password: str, address: str) -> Role:
        if not user or len(user) + len(password) > CREDENTIALS_CHARS_MAX or "\0" in user + password:
            raise Unauthorized(WRONG)
        await to_thread.run_sync(self._authenticate.check, user, password, address, limiter=self._limiter)
        if user.strip().casefold() in self._confined:
            raise Forbidden("this account belongs to another service, and cannot use the page", hint="log in as a person")
        return await to_thread.run_sync(self._authenticate.role_of, user)

    async def begin_oidc(self, scope: Scope, following: str) -> Began:
        """The address at which the browser logs in by the OpenID provider. SourceUnreachable."""
        oidc = self._oidc()
        address = self._address(scope)
        return await to_thread.run_sync(oidc.begin, address, following, limiter=self._provider_limiter)

    async def end_oidc(self, scope: Scope, parameters: Mapping[str, str]) -> tuple[str, str]:
        """The secret of a new session, and the page that its person wanted. Unauthorized, Forbidden, SourceUnreachable."""
        oidc, address = self._oidc(), self._address(scope)

        def refuse(account: str, error: SynvirtError) -> None:
            self._coming.refuse(account, address, OIDC, error)

        browser = browser_in(Headers(scope=scope).get("cookie", ""))
        ended = await to_thread.run_sync(oidc.end, parameters, browser, refuse, limiter=self._provider_limiter)
        await self._noted(self._coming.came, Caller(ended.account, ended.role, address), OIDC)
        return await to_thread.run_sync(self._sessions.begin, ended.account, ended.role), ended.following

    def log_out(self, scope: Scope) -> bool:
        """True, if the person may still be logged in at the OpenID provider. Blocks."""
        secret = secret_in(Headers(scope=scope).get("cookie", ""))
        login = self._sessions.of(secret)
        self._sessions.end(secret)
        if login is None:
            return False
        way, caller = PAGE if login.role is None else OIDC, scope[CALLER]
        self._coming.left(Caller(login.account, login.role or caller.role, caller.address), way)
        return way == OIDC

    def _oidc(self) -> Oidc:
        if self.oidc is None:
            raise NotFound("there is no such page")
        return self.oidc

    def _refusal(self, scope: Scope, error: SynvirtError) -> Response:
        """A browser is sent to the page's log-in, as its own password box keeps the password until the browser closes. But not
        with a form: what was typed would be lost, while an answer to the form can be loaded again, which sends it again."""
        headers = Headers(scope=scope)
        if not isinstance(error, Unauthorized):
            return answered(scope, error)
        if isinstance(error, TooManyAttempts):  # RFC 6585: the password may be right
            waiting = of_its_side(scope["path"], BadRequest(error.detail, hint=error.hint))
            return problem(waiting, status=HTTPStatus.TOO_MANY_REQUESTS, headers={"Retry-After": str(math.ceil(error.wait_s))})
        if "authorization" in headers or "sec-fetch-site" not in headers:
            return problem(of_its_side(scope["path"], error))
        login, reading = f"{self._base_url}/login", scope["method"] in READING
        if headers.get("sec-fetch-mode") == "navigate" and (reading or headers["sec-fetch-site"] == "same-origin"):
            if reading:
                asked = scope["path"] + ("?" + scope["query_string"].decode("latin-1") if scope["query_string"] else "")
                return RedirectResponse(f"{login}?next={quote(asked, safe='')}", status_code=303)
            if scope["path"] == f"{self._base_url}/logout":
                return RedirectResponse(login, status_code=303)
            refusal = answered(scope, Unauthorized(ENDED, hint=SEND_AGAIN))
        else:
            refusal = problem(of_its_side(scope["path"], Unauthorized(ENDED, hint=TRY_AGAIN)))
        if "WWW-Authenticate" in refusal.headers:
            del refusal.headers["WWW-Authenticate"]
        if "hx-request" in headers:
            refusal.headers["HX-Redirect"] = f"{login}?next={quote(_here(headers.get('hx-current-url', '')), safe='')}"
        return refusal

    def _is_asked(self, scope: Scope) -> bool:
        path = scope["path"]
        if path in OPEN_PATHS:
            return "authorization" in Headers(scope=scope)
        opening = (f"{self._base_url}{page}" for page in LOGIN_PATHS)
        return path not in opening and not path.startswith(f"{self._base_url}/static/")

    async def _by_token(self, secret: str, address: str) -> Caller:
        found = None
        if secret.startswith(TOKEN_PREFIX) and len(secret) <= CREDENTIALS_CHARS_MAX:
            found = await to_thread.run_sync(self._find_token, secret, limiter=self._store_limiter)
        if found is None:
            raise Unauthorized("this token is not known: it was revoked, has expired, or never existed")
        role = await to_thread.run_sync(self._role_of_token, found)
        return Caller(f"token:{found.name}", role, address, account_of_token=found.account)

    def _role_of_token(self, token: Token) -> Role:
        """The token's role, or the lower one that the account which made it has now. Unauthorized, if that one has none any
        more. The socket's callers, and persons of an OpenID provider, have no account here."""
        if token.account == LOCAL_ACCOUNT or ":" in token.account:
            return token.role
        try:
            role = self._authenticate.role_of(token.account)
        except (Unauthorized, Forbidden) as error:
            raise Unauthorized(
                f"this token is refused: the account {token.account}, which made it, may not use this service any more",
                hint="ask another account for a new one",
            ) from error
        return token.role if role.reaches(token.role) else role

    def _address(self, scope: Scope) -> str:
        """The caller's address; behind one of our proxies, the one that the proxy itself added last."""
        client = scope.get("client")
        address = client[0] if client else ""
        # Some proxies add a field of their own behind the caller's (HAProxy), others add to it (nginx).
        fields = Headers(scope=scope).getlist("x-forwarded-for")
        forwarded = fields[-1].rpartition(",")[2].strip() if fields else ""
        if self._proxies and forwarded:
            with contextlib.suppress(ValueError):
                if any(ipaddress.ip_address(address) in proxy for proxy in self._proxies):
                    return str(ipaddress.ip_address(forwarded))
        return address

    def _confine(self, user: str, scope: Scope) -> None:
        paths = self._confined.get(user.strip().casefold())
        if paths is not None and not any(scope["path"] == path or scope["path"].startswith(f"{path}/") for path in paths):
            raise Unauthorized("this account may use only the folder that is offered to it", hint=f"call {paths[0]}")


def _acting_for(caller: Caller | None) -> contextlib.AbstractContextManager[object]:
    if caller is None:
        return contextlib.nullcontext()
    return acting(Act(shown_account(caller), caller.role, caller.address, by_session=caller.by_session))


class FromSocket:
    """The app for the Unix socket's server: its callers count as authenticated, by the file's mode."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[LOCAL] = True
        await self._app(scope, receive, send)


def _here(address: str) -> str:
    """The path and query of the page that a script runs on; the log-in checks it like every other."""
    try:
        page = urlsplit(address)
    except ValueError:
        return ""
    return page.path + (f"?{page.query}" if page.query else "")


def _credentials(header: str | None) -> tuple[str, str]:
    """User and password, by RFC 7617: base64 of user:password, in UTF-8."""
    if header is None:
        raise Unauthorized("no credentials were sent", hint="send HTTP Basic credentials, or use the Unix socket on the host")
    scheme, _, encoded = header.partition(" ")
    try:
        if scheme.lower() == "basic" and len(encoded) <= CREDENTIALS_CHARS_MAX:
            decoded = base64.b64decode(encoded.strip(), validate=True).decode()
            user, colon, password = decoded.partition(":")
            if colon and user and "\0" not in decoded:
                return user, password
    except (binascii.Error, ValueError):
        pass
    raise Unauthorized("the Authorization header is not HTTP Basic with a user and a password")
