"""How a source or a remote file is reached: its endpoint, the certificate it must show, credentials."""

from collections.abc import Collection, Mapping
from typing import Annotated, TypeVar

from pydantic import AfterValidator, Field, SecretStr, StringConstraints

from synvirt.model.values import Name, Received


def _colons(value: str) -> str:
    """The fingerprint with colons, as browsers and `openssl x509 -fingerprint` show it."""
    digits = value.replace(":", "").upper()
    return ":".join(digits[at : at + 2] for at in range(0, len(digits), 2))


Fingerprint = Annotated[
    str, StringConstraints(pattern=r"^([0-9A-Fa-f]{2}:){31}[0-9A-Fa-f]{2}$|^[0-9A-Fa-f]{64}$"), AfterValidator(_colons)
]
Endpoint = Annotated[
    str, StringConstraints(strip_whitespace=True, min_length=1, max_length=2048, pattern=r"^[^\x00-\x20\x7f]+$")
]
# Typed by hand, and typed again to find it.
SourceName = Annotated[Name, StringConstraints(strip_whitespace=True)]
# A private key is the longest secret; 32 fields are more than any platform has.
Credentials = Annotated[
    dict[Annotated[str, StringConstraints(min_length=1, max_length=64)], Annotated[SecretStr, Field(max_length=65536)]],
    Field(max_length=32),
]


V = TypeVar("V")
# Sources call a person's name `user`; remote files and peers call it `username`. Each takes the other's word too.
_OTHER_WORD = {"user": "username", "username": "user"}


def in_words_of(known: Collection[str], credentials: Mapping[str, V]) -> dict[str, V]:
    """The credentials by the names in `known`. An unknown name stays, and so does one whose other word is given too."""

    def word(name: str) -> str:
        other = _OTHER_WORD.get(name, name)
        return other if name not in known and other in known and other not in credentials else name

    return {word(name): value for name, value in credentials.items()}


class SourceOptions(Received):
    """The options of every platform. A platform with more options has its own model, derived from this one.

    `fingerprint_sha256` pins the certificate that the platform must show, no matter who signed it. Without it, `verify_tls`
    asks for a certificate that this host's authorities signed."""

    verify_tls: bool = True
    fingerprint_sha256: Fingerprint | None = None


class RemoteOptions(SourceOptions):
    """`region` and `endpoint` (https://minio.example:9000) are S3's; without an endpoint it is AWS."""

    region: Annotated[str, StringConstraints(pattern=r"^[a-z0-9-]{1,64}$")] | None = None
    endpoint: Endpoint | None = None


# The name or the id of a VM in a file that holds several.
ChosenVm = Annotated[
    Annotated[str, StringConstraints(min_length=1, max_length=255)] | None, Field(exclude_if=lambda value: value is None)
]


class RemoteFileRequest(Received):
    """Body of POST /remote-files/inspect: a remote file, or a folder (the URL then ends with a slash).

    credentials: `username` and `password` of http and smb (and `domain`), `token` of http; `access_key_id`,
    `secret_access_key` and `session_token` of s3. Secrets in the URL itself (user:password@, a signed query) are kept like
    credentials: sealed with the job, and in no answer."""

    url: Annotated[str, StringConstraints(max_length=8192, pattern=r"^(https?|s3|smb)://[^\x00-\x1f\x7f]+$")]
    credentials: Credentials = Field(default_factory=dict)
    options: RemoteOptions = RemoteOptions()
    vm: ChosenVm = None
