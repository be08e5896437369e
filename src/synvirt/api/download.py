"""A file of the service as an answer: whole, ranges of it, or that the caller has it already."""

from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.responses import FileResponse, Response
from starlette.types import Message, Receive, Scope, Send

from synvirt.api.problems import problem
from synvirt.errors import BadRequest


class Download(FileResponse):
    """Ranges that cannot be had are a problem, as all errors are; a known ETag (If-None-Match) is 304 without the content."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked, instead = Headers(scope=scope), None

        async def sending(message: Message) -> None:
            nonlocal instead
            if message["type"] == "http.response.start":
                instead = _instead(message["status"], Headers(raw=message["headers"]), asked)
            if instead is None:
                await send(message)

        await super().__call__(scope, receive, sending)
        if instead is not None:
            status, headers = instead
            if status == HTTPStatus.NOT_MODIFIED:
                await Response(status_code=status, headers=headers)(scope, receive, send)
            else:
                refusal = BadRequest(
                    f"Range: the file does not have {asked['range']}", hint="bytes=0-99 is a range, for example"
                )
                await problem(refusal, status=status, headers=headers)(scope, receive, send)


def _instead(status: int, told: Headers, asked: Headers) -> tuple[int, dict[str, str]] | None:
    """What is answered in place of the content: a status and its headers."""
    if status >= HTTPStatus.BAD_REQUEST:
        return status, {name: told[name] for name in ("content-range",) if name in told}
    known = {tag.strip().removeprefix("W/") for tag in asked.get("if-none-match", "").split(",")}
    return (HTTPStatus.NOT_MODIFIED, {"etag": told["etag"]}) if known & {"*", told["etag"]} else None
