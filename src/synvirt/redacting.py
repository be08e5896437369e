"""Removes secrets from what is shown: logs, and the support bundle.

The second line of defence. The first: secrets are SecretStr and sealed, and no code that prints gets them. Here, what looks
like a secret by its field's name or its form is removed as well: rather too much than too little.
"""

import re
from collections.abc import Sequence
from typing import Any

GONE = "(redacted)"

# Fields whose value is always a secret. A disk's `key` and a `fingerprint` are none.
_WORDS = (
    r"passw|passphrase|secret|token|credential|private[_-]?key|access[_-]?key|api[_-]?key|recovery[_-]?key|session[_-]?id|"
    r"soap[_-]session|signature"
)
_SECRET_NAME = re.compile(rf"{_WORDS}|authori[sz]ation|cookie|sealed", re.I)
# In a list, such as the arguments of a program or the headers of a request: what names the following item.
_NAMES_NEXT = re.compile(r"-{0,2}[a-z][\w.-]{0,60}:?", re.I)
# The account with its password, as curl and smbclient take it.
_ACCOUNT_OPTIONS = frozenset({"-u", "--user", "-U"})
_ACCOUNT = re.compile(r"^([^\s:%]{1,200}[:%]).+", re.S)
# The end of a field's name that says where a secret is.
_PATH_SUFFIX = "_file"
# \bpwd, \bsig: short words that are also parts of longer, harmless words.
_NAME = rf"(?:{_WORDS}|AuthCookie|\bpwd\b|\bsig\b|:key\b)[\w.-]{{0,40}}"
_QUOTED = r"\\\"(?:[^\"\\]|\\(?!\"))*\\\"|\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'"
_VALUE = rf"{_QUOTED}|[^\s,;&\"'}}\]]+"
# Each row: what is found, and what replaces it. The order matters: whole blocks first. The part before a literal has a limited
# length, so that a hostile line costs only time in proportion to its length.
_SHAPES = (
    (re.compile(r"-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----.*?(?:-----END [A-Z ]{0,30}PRIVATE KEY-----|\Z)", re.S), GONE),
    # RFC 3986: userinfo ends at the last @ before the path; a password may contain one.
    (re.compile(r"(\b[a-z][a-z0-9+.-]{1,20}://)[^\s/?#\"'<>]{0,2000}@", re.I), rf"\1{GONE}@"),
    # A signed URL's query is a key; other queries are not needed in a log. The query of {data_dir}/libvirt is no secret.
    (re.compile(r"(\b(?:https?|s3|smb|wss?)://[^\s?#\"'<>]{0,2000})\?[^\s#\"'<>]+", re.I), rf"\1?{GONE}"),
    # The whole header, of whichever scheme; a scheme without its header.
    (re.compile(rf"(\bauthori[sz]ation\\?[\"']?\s*[:=,]\s*b?)(?:{_QUOTED})", re.I), rf"\1{GONE}"),
    (
        re.compile(r"(\bauthori[sz]ation\s*[:=]\s*)(?!\()[^\s\"'][^\r\n\"']*(?:(?<==)\"[^\r\n\"]*\"[^\r\n\"']*)*", re.I),
        rf"\1{GONE}",
    ),
    (re.compile(r"\b(Basic|Bearer|Digest)\s+[A-Za-z0-9+/=._~-]{6,}", re.I), rf"\1 {GONE}"),
    (re.compile(r"\b(NTLM|Negotiate|Kerberos)\s+[A-Za-z0-9+/=._~-]{20,}", re.I), rf"\1 {GONE}"),
    # The whole header of a cookie; an element's text and attributes; the code of an authorization.
    (re.compile(r"\b((?:Set-)?Cookie\\?[\"']?\s*:\s*\\?[\"']?)[^\r\n\"']+", re.I), rf"\1{GONE}"),
    (re.compile(rf"(<[\w:.-]{{0,60}}?{_NAME})\s[^<>]{{0,2000}}>", re.I), rf"\1 {GONE}>"),
    (re.compile(rf"(<[\w:.-]{{0,60}}?{_NAME}[^<>]{{0,200}}>)[^<>]{{1,2000}}(?=</)", re.I), rf"\1{GONE}"),
    (re.compile(r"([?&](?:code|state|sig|nonce)=)[^\s&#\"'<>]+"), rf"\1{GONE}"),
    # password=x, "token": "x", Token('x'), password%3Dx; and the same within a JSON string
    (re.compile(rf"({_NAME}\\?[\"']?\s*(?:[:=(]|%3D|%3A)\s*)({_VALUE})", re.I), rf"\1{GONE}"),
    # The first start's own line, and what people write: the password x
    (re.compile(r"(\b(?:password|passphrase|token)\s+(?:is\s+)?)(?=\S*[\d-])[A-Za-z0-9_-]{8,}", re.I), rf"\1{GONE}"),
    (re.compile(r"\b[a-km-z2-9]{5}(?:-[a-km-z2-9]{5}){3}\b"), GONE),
    (re.compile(r"\bsvt_[A-Za-z0-9_-]{20,}"), GONE),
    # A recovery key, and a sealed copy of one.
    (re.compile(r"\b[A-Z2-7]{4}(?:-[A-Z2-7]{4}){12}-[A-Z2-7]{3}\b"), GONE),
    (re.compile(r"\bsynvirt-key-1:[\w:+/=-]+"), GONE),
    # curl -u user:x, smbclient -U 'user%x', and the same as a list: "-u", "user:x"
    (re.compile(r"((?:^|\s)(?:-u|--user|-U)[=\s]\s*[^\s:%\"'\\]{1,200}[:%])\S+"), rf"\1{GONE}"),
    (
        re.compile(r"((?:^|[\s\"'])(?:-u|--user|-U)(?:[=\s]\s*|\\?[\"']\s*,\s*b?)\\?[\"'][^\s:%\"'\\]{1,200}[:%])[^\"'\\]+"),
        rf"\1{GONE}",
    ),
    # sshpass -p x, and "sshpass", "-p", "x"
    (
        re.compile(rf"(\bsshpass(?:\s+|\\?[\"']\s*,\s*b?\\?[\"'])-p(?:\\?[\"']\s*,\s*b?|\s*))(?:{_QUOTED}|[^\s\"'\\]+)"),
        rf"\1{GONE}",
    ),
    # "--password", "x", and the lists of headers that some programs print
    (re.compile(rf"([\"'][\w.-]{{0,40}}?{_NAME}\\?[\"']\s*,\s*b?)(?:{_QUOTED})", re.I), rf"\1{GONE}"),
    # --secret x
    (re.compile(rf"(--[a-z-]{{0,20}}?{_NAME}\s+)(?!-)\S+", re.I), rf"\1{GONE}"),
)


def redacted_text(text: str, *, known: tuple[str, ...] = ()) -> str:
    """The text without secrets. `known`: secrets that the caller has; they are removed everywhere."""
    for secret in known:
        if secret:
            text = text.replace(secret, GONE)
    for shape, stays in _SHAPES:
        text = shape.sub(stays, text)
    return text


def redacted(value: Any, *, known: tuple[str, ...] = ()) -> Any:
    """JSON, or the fields of a log line, without secrets."""
    match value:
        case dict():
            return {
                redacted_text(str(name), known=known): (
                    GONE
                    if _is_secret(str(name)) and held not in (None, "", {}, [], True, False)
                    else redacted(held, known=known)
                )
                for name, held in value.items()
            }
        case list() | tuple():
            return [_of_list(value[:place], held, known) for place, held in enumerate(value)]
        case str():
            return redacted_text(value, known=known)
        case _:
            return value


def _of_list(before: Sequence[Any], held: Any, known: tuple[str, ...]) -> Any:
    """An item of a list without its secret, which the items before it may announce."""
    name = before[-1] if before and isinstance(before[-1], str) else ""
    if not name or not isinstance(held, str):
        return redacted(held, known=known)
    is_sshpass = name == "-p" and any(isinstance(one, str) and one.rpartition("/")[2] == "sshpass" for one in before)
    if is_sshpass or (_NAMES_NEXT.fullmatch(name) and _is_secret(name) and not held.startswith("-")):
        return GONE
    if name in _ACCOUNT_OPTIONS:
        held = _ACCOUNT.sub(rf"\1{GONE}", held)
    return redacted_text(held, known=known)


def _is_secret(name: str) -> bool:
    return _SECRET_NAME.search(name) is not None and not name.lower().replace("-", "_").endswith(_PATH_SUFFIX)
