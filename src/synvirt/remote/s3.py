"""Objects of S3 (AWS, MinIO, Ceph, Wasabi and others): HTTP ranges, each request signed.

    s3://bucket/exports/vm.ova ─▶ https://bucket.s3.REGION.amazonaws.com/exports/vm.ova         no endpoint given
                               ─▶ https://minio.example:9000/bucket/exports/vm.ova              options.endpoint

The signature is AWS's version 4 («Signature Version 4 signing process», in the reference of IAM), here without a body: an HMAC
over the request's first line, its host and its date. So S3 has the same guard, TLS, retries and checks as HTTP, and needs no
library. Without credentials nothing is signed: public buckets answer all the same.
"""

import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Final
from urllib.parse import parse_qsl, quote, unquote_plus

from synvirt import xml_document
from synvirt.errors import BadRequest, MalformedArchive, NotFound
from synvirt.remote import Interrupted, Remote, urls
from synvirt.remote.http import HttpPlace, refused
from synvirt.remote.urls import Url

_DEFAULT_REGION: Final = "us-east-1"
# SHA-256 of nothing: a GET has no body.
_EMPTY_SHA256: Final = hashlib.sha256(b"").hexdigest()
_CODE: Final = re.compile(rb"<Code>([A-Za-z]{1,64})</Code>")
# A page has 1000 keys in some 300 KiB. A VM's folder has a few files, or some thousands if a file is in chunks.
_PAGE_MAX_BYTES: Final = 4 << 20
_PAGES_MAX: Final = 100
_NAMESPACE: Final = "{http://s3.amazonaws.com/doc/2006-03-01/}"
_HINTS: Final = {
    "NoSuchBucket": "check the bucket's name, the region and the endpoint",
    "PermanentRedirect": "the bucket is in another region: give options.region",
    "AuthorizationHeaderMalformed": "the bucket is in another region: give options.region",
    "RequestTimeTooSkewed": "set this host's clock",
}


class S3Place(HttpPlace):
    """A bucket of S3, and the folder in it."""

    def __init__(self, remote: Remote) -> None:
        super().__init__(remote, sign=self._signature)
        base = urls.parse(remote.url)
        self._bucket, self._prefix = base.host, base.path
        self._region = remote.region or _DEFAULT_REGION
        self._endpoint = self._endpoint_of(remote)

    def _endpoint_of(self, remote: Remote) -> Url:
        """Where the bucket's keys begin: a host of its own, or a folder of the endpoint's."""
        if remote.endpoint:
            endpoint = urls.parse(remote.endpoint)
            if endpoint.scheme not in ("http", "https"):
                raise BadRequest("options.endpoint is an http or https URL", hint="for example https://minio.example:9000")
            return replace(endpoint, path=f"{endpoint.path.rstrip('/')}/{quote(self._bucket)}")
        host = f"s3.{self._region}.amazonaws.com"
        if "." in self._bucket:  # a wildcard certificate covers only one label
            return Url("https", host, 443, f"/{quote(self._bucket)}")
        return Url("https", f"{self._bucket}.{host}", 443, "")

    def url(self, name: str) -> Url:
        """The URL of an object."""
        key = self._prefix + name
        return replace(self._endpoint, path=self._endpoint.path + quote(key, safe="/-_.~", errors="surrogateescape"))

    def names(self, folder: str) -> list[str]:
        """The names directly in a folder: ListObjectsV2 with the delimiter `/`."""
        # Only the first slash is the URL's: a key may begin with one.
        prefix = self._prefix.removeprefix("/") + (f"{folder}/" if folder else "")
        found: list[str] = []
        token = ""
        for _ in range(_PAGES_MAX):
            # A key may have characters that XML cannot hold: they come as in a URL.
            query = {"list-type": "2", "delimiter": "/", "encoding-type": "url", "prefix": prefix}
            page = self._page(query | ({"continuation-token": token} if token else {}))
            found += [name.removeprefix(prefix) for name in page[0] if name != prefix]
            token = page[1]
            if not token:
                return [f"{folder}/{name}" if folder else name for name in found]
        raise MalformedArchive(f"s3://{self._bucket}/{prefix} has over {_PAGES_MAX * 1000} objects; no VM has")

    def _page(self, query: Mapping[str, str]) -> tuple[list[str], str]:
        written = "&".join(f"{quote(key, safe='-_.~')}={quote(value, safe='-_.~')}" for key, value in sorted(query.items()))
        url = replace(self._endpoint, path=self._endpoint.path or "/", query=written)
        answer = self.ask(url, {}, asked_for=url)
        if answer.status != 200:
            raise refused(answer.status, url.shown, self.reason(answer.refusal()), answer.headers.get("retry-after"))
        root = xml_document.parse(answer.text(_PAGE_MAX_BYTES), f"{url.shown} gives an answer that is not a list of S3: it")
        ours = _NAMESPACE if root.tag.startswith(_NAMESPACE) else ""
        found = [element.text or "" for element in root.iterfind(f"{ours}Contents/{ours}Key")]
        if root.findtext(f"{ours}EncodingType") == "url":  # not every server knows of it
            found = [unquote_plus(key, errors="surrogateescape") for key in found]
        return found, root.findtext(f"{ours}NextContinuationToken") or ""

    def reason(self, body: bytes) -> str:
        """The cause in an error's XML body, with its meaning; empty, where there is none."""
        code = _CODE.search(body)
        if code is None:
            return ""
        name = code[1].decode()
        return f"{name}: {_HINTS[name]}" if name in _HINTS else name

    def _signature(self, url: Url) -> dict[str, str]:
        access_key, secret = self._remote.credential("access_key_id"), self._remote.credential("secret_access_key")
        if not access_key:
            return {}
        return signature(
            url,
            access_key=access_key,
            secret=secret,
            token=self._remote.credential("session_token"),
            region=self._region,
            at=datetime.now(UTC),
        )


def signature(url: Url, *, access_key: str, secret: str, token: str, region: str, at: datetime) -> dict[str, str]:
    """The headers of a signed GET, valid for fifteen minutes."""
    moment = at.strftime("%Y%m%dT%H%M%SZ")
    scope = f"{moment[:8]}/{region}/s3/aws4_request"
    headers = {"host": url.authority, "x-amz-content-sha256": _EMPTY_SHA256, "x-amz-date": moment}
    if token:
        headers["x-amz-security-token"] = token
    names = ";".join(sorted(headers))
    pairs = sorted((quote(key, safe="-_.~"), quote(value, safe="-_.~")) for key, value in _query(url))
    canonical = "\n".join(
        [
            "GET",
            url.path or "/",
            "&".join(f"{key}={value}" for key, value in pairs),
            *(f"{key}:{headers[key]}" for key in sorted(headers)),
            "",
            names,
            _EMPTY_SHA256,
        ]
    )
    to_sign = "\n".join(["AWS4-HMAC-SHA256", moment, scope, hashlib.sha256(canonical.encode()).hexdigest()])
    key = f"AWS4{secret}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    proof = hmac.digest(key, to_sign.encode(), "sha256").hex()
    del headers["host"]  # every request has it
    return {
        **headers,
        "authorization": f"AWS4-HMAC-SHA256 Credential={access_key}/{scope}, SignedHeaders={names}, Signature={proof}",
    }


def _query(url: Url) -> list[tuple[str, str]]:
    return parse_qsl(url.query, keep_blank_values=True)


__all__ = ["Interrupted", "NotFound", "S3Place", "signature"]
