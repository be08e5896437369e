"""{base_url}/api/v1/tokens: secrets for scripts, sent as `Authorization: Bearer`. Each is shown once; only its hash is
stored."""

import hashlib
import secrets
from datetime import timedelta
from typing import Annotated
from uuid import UUID, uuid4

from fastapi import APIRouter, Depends, Request, Response
from pydantic import Field

from synvirt.accounts import Role
from synvirt.api.callers.gate import CALLER, TOKEN_PREFIX, FindToken
from synvirt.api.paging import PAGE_LIMIT, Cursor, Limit, cursor_of, number_of
from synvirt.api.received import documented, json_body
from synvirt.api.routing import Routes
from synvirt.model.values import Model, Received, now
from synvirt.store.access import Token, TokenRows

SECRET_BYTES = 32


class TokenRequest(Received):
    """`expires_days` None: it is valid until it is revoked."""

    name: Annotated[str, Field(min_length=1, max_length=60, pattern=r"^[\w.-]+$")]
    role: Role = Role.VIEWER
    expires_days: Annotated[float, Field(gt=0, le=3650)] | None = 90


class TokenMade(Token):
    """The answer to its making, and the only one with the secret."""

    secret: str


class TokenPage(Model):
    """API tokens, oldest first, without their secrets. `next_cursor` of the last page is null; otherwise send it as
    `?cursor=`."""

    items: tuple[Token, ...]
    next_cursor: str | None = None


def find_token(rows: TokenRows) -> FindToken:
    """A function from a secret to the token; None: no such token."""
    return lambda secret: rows.by_secret(_hashed(secret))


def tokens_router(rows: TokenRows) -> APIRouter:
    """The routes under /tokens."""
    router = Routes(prefix="/tokens", tags=["tokens"])

    @router.post("", status_code=201, response_model=TokenMade, openapi_extra=documented(TokenRequest))
    def make_token(
        token: Annotated[TokenRequest, Depends(json_body(TokenRequest))], request: Request, response: Response
    ) -> TokenMade:
        """Make an API token. Only this answer has its secret."""
        # 256 random bits need no slow hash: they cannot be guessed.
        secret = TOKEN_PREFIX + secrets.token_urlsafe(SECRET_BYTES)
        at = now()
        caller = request.scope[CALLER]
        made = Token(
            id=uuid4(),
            name=token.name,
            role=token.role,
            account=caller.account_of_token or caller.account,
            created_at=at,
            expires_at=None if token.expires_days is None else at + timedelta(days=token.expires_days),
        )
        rows.add(made, _hashed(secret))
        response.headers["Location"] = f"{request.url.path}/{made.id}"
        return TokenMade(**made.model_dump(), secret=secret)

    @router.get("", response_model=TokenPage)
    def list_tokens(limit: Limit = PAGE_LIMIT, cursor: Cursor = None) -> TokenPage:
        """List the API tokens, without their secrets."""
        items, following = rows.page(limit=limit, cursor=number_of(cursor))
        return TokenPage(items=tuple(items), next_cursor=cursor_of(following))

    @router.delete("/{token_id}", status_code=204)
    def revoke_token(token_id: UUID) -> None:
        """Revoke an API token. It is refused from now on; streams that it opened end."""
        rows.remove(token_id)

    return router


def _hashed(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
