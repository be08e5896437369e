"""A real OpenID provider, of parts that others keep: Django, and its OAuth toolkit, as a process of its own, by TLS.

    python -m tests.fakes.oidc_provider FOLDER PORT REDIRECT_URI

FOLDER has server.pem and server-key.pem; its database and signing key are made there. Its people: USERS, the password is their
name. A file FOLDER/bend has its ID tokens bent: what it holds (JSON) replaces claims; `"alg"` there is how they are signed.
"""

import base64
import json
import ssl
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import django
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from django.conf import settings
from jwcrypto import jwk, jwt

from tests.servers.oidc import CLIENT, SECRET

# And their groups.
USERS: dict[str, list[str]] = {"anna": ["staff", "virt-admins"], "olga": ["virt-operators"], "gast": ["guests"]}
APPS = ("auth", "contenttypes", "sessions", "oauth2_provider")


def configure(folder: Path, port: int, key: str) -> None:
    settings.configure(
        SECRET_KEY="of this test alone",
        ALLOWED_HOSTS=["*"],
        ROOT_URLCONF=f"{__package__}.oidc_provider_urls",
        LOGIN_URL="/login/",
        USE_TZ=True,
        INSTALLED_APPS=[app if app == "oauth2_provider" else f"django.contrib.{app}" for app in APPS],
        # The tables as they are now, at once: all changes that there ever were take a second of a core.
        MIGRATION_MODULES=dict.fromkeys(APPS),
        MIDDLEWARE=[
            "django.contrib.sessions.middleware.SessionMiddleware",
            "django.middleware.csrf.CsrfViewMiddleware",
            "django.contrib.auth.middleware.AuthenticationMiddleware",
        ],
        DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": str(folder / "provider.db")}},
        TEMPLATES=[
            {
                "BACKEND": "django.template.backends.django.DjangoTemplates",
                "OPTIONS": {
                    "loaders": [("django.template.loaders.locmem.Loader", {"registration/login.html": LOGIN})],
                    "context_processors": ["django.template.context_processors.request"],
                },
            }
        ],
        PASSWORD_HASHERS=["django.contrib.auth.hashers.MD5PasswordHasher"],
        OAUTH2_PROVIDER={
            "OIDC_ENABLED": True,
            "OIDC_RP_INITIATED_LOGOUT_ENABLED": True,
            "OIDC_RSA_PRIVATE_KEY": key,
            "OIDC_ISS_ENDPOINT": f"https://localhost:{port}/o",
            "OAUTH2_VALIDATOR_CLASS": f"{__package__}.oidc_provider_urls.Validator",
            "SCOPES": {"openid": "who", "profile": "name", "email": "mail"},
        },
    )


LOGIN = '<form method="post">{% csrf_token %}{{ form.as_p }}<button type="submit">Let me in</button></form>'


class Bending:
    """A layer around the provider: what a hostile one, or somebody in its place, would send."""

    def __init__(self, app: Any, folder: Path, key: str) -> None:
        self._app, self._bend, self._key = app, folder / "bend", jwk.JWK.from_pem(key.encode())

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        if environ["PATH_INFO"] != "/o/token/" or not self._bend.exists():
            yield from self._app(environ, start)
            return
        bent = json.loads(self._bend.read_text())
        begun: list[Any] = []
        body = json.loads(b"".join(self._app(environ, lambda *what: begun.append(what))))
        if "id_token" in body:
            _, payload, _ = body["id_token"].split(".")
            claims = json.loads(base64.urlsafe_b64decode(payload + "=="))
            body["id_token"] = self._signed(claims | {k: v for k, v in bent.items() if k != "alg"}, bent.get("alg", "RS256"))
        answer = json.dumps(body).encode()
        headers = [(k, v) for k, v in begun[0][1] if k.lower() != "content-length"]
        start(begun[0][0], [*headers, ("Content-Length", str(len(answer)))])
        yield answer

    def _signed(self, claims: dict[str, Any], alg: str) -> str:
        if alg == "none":
            parts = (json.dumps(part).encode() for part in ({"alg": "none", "typ": "JWT"}, claims))
            return ".".join(base64.urlsafe_b64encode(part).rstrip(b"=").decode() for part in parts) + "."
        key = self._key
        if alg == "HS256":  # by what everybody knows: RFC 8725, section 2.1
            key = jwk.JWK(kty="oct", k=base64.urlsafe_b64encode(self._key.export_to_pem()).rstrip(b"=").decode())
        elif alg == "stranger":
            key = jwk.JWK.generate(kty="RSA", size=2048, kid=self._key.thumbprint())
        header = {"alg": "RS256" if alg == "stranger" else alg, "kid": self._key.thumbprint()}
        token = jwt.JWT(header=header, claims=claims)
        token.make_signed_token(key)
        return str(token.serialize())


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Quiet(WSGIRequestHandler):
    def get_environ(self) -> dict[str, Any]:
        return super().get_environ() | {"HTTPS": "on"}  # wsgiref takes the scheme from it

    def log_request(self, code: object = "-", size: object = "-") -> None:
        pass


def people(redirect_uri: str) -> None:
    from django.contrib.auth.models import Group, User
    from oauth2_provider.models import Application

    for name, groups in USERS.items():
        user = User.objects.create_user(name, f"{name}@example.org", name)
        user.groups.set([Group.objects.get_or_create(name=group)[0] for group in groups])
    Application.objects.create(
        client_id=CLIENT,
        client_secret=SECRET,
        client_type="confidential",
        authorization_grant_type="authorization-code",
        redirect_uris=redirect_uri,
        algorithm="RS256",
        skip_authorization=True,
        name="SynVirt",
    )


def main() -> None:
    folder, port, redirect_uri = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    made = rsa.generate_private_key(65537, 2048)
    form = serialization.PrivateFormat.PKCS8
    key = made.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()).decode()
    configure(folder, port, key)
    django.setup()
    from django.core.management import call_command
    from django.core.wsgi import get_wsgi_application

    call_command("migrate", run_syncdb=True, skip_checks=True, verbosity=0)
    people(redirect_uri)
    server = make_server("127.0.0.1", port, Bending(get_wsgi_application(), folder, key), _Server, _Quiet)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem", folder / "server-key.pem")
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print("ready", flush=True)
    sys.stdin.read()  # ends with whoever started it


if __name__ == "__main__":
    main()
