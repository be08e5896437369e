"""Starts the OpenID provider of tests/fakes/oidc_provider.py, and goes through its log-in as a browser would."""

import html
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.running.ports import free_port
from tests.servers.certificates import Certificate, self_signed

CLIENT, SECRET = "synvirt", "a client's secret: +/%"
ROLES = {"virt-admins": "admin", "virt-operators": "operator"}


@dataclass(frozen=True, slots=True)
class Provider:
    """On localhost: another site than 127.0.0.1, where the service is."""

    folder: Path
    port: int
    certificate: Certificate
    redirect_uri: str

    @property
    def issuer(self) -> str:
        return f"https://localhost:{self.port}/o"

    @property
    def settings(self) -> dict[str, Any]:
        """Of a service that lets its people in."""
        secret = self.folder / "secret"
        secret.write_text(SECRET + "\n")
        return {
            "oidc_issuer": self.issuer,
            "oidc_client_id": CLIENT,
            "oidc_client_secret_file": secret,
            "oidc_redirect_uri": self.redirect_uri,
            "oidc_roles": ROLES,
            "oidc_fingerprint_sha256": self.certificate.fingerprint,
            "oidc_label": "Lab",
        }

    @contextmanager
    def bent(self, claims: Mapping[str, object]) -> Iterator[None]:
        """Its ID tokens say this as long as the block lasts."""
        bend = self.folder / "bend"
        bend.write_text(json.dumps(claims))
        try:
            yield
        finally:
            bend.unlink()


@contextmanager
def provided(folder: Path, redirect_uri: str) -> Iterator[Provider]:
    made = Provider(folder, free_port(), self_signed(folder), redirect_uri)
    argv = [sys.executable, "-m", "tests.fakes.oidc_provider", str(folder), str(made.port), redirect_uri]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield made
        process.communicate()


def logged_in_at(url: str, user: str) -> str:
    """Where the provider sends a person who came to `url` and logged in there."""
    with httpx.Client(verify=False, timeout=60) as browser:
        response = browser.get(url)
        assert response.status_code == 302, response.text
        page_url = response.next_request.url if response.next_request else httpx.URL("")
        page = browser.get(page_url)
        [token] = re.findall(r'name="csrfmiddlewaretoken" value="([^"]+)"', page.text)
        form = {"csrfmiddlewaretoken": token, "username": user, "password": user}
        sent = browser.post(page_url, data=form, headers={"Referer": str(page_url)})
        assert sent.status_code == 302, sent.text
        back = browser.get(page_url.join(sent.headers["Location"]))
        assert back.status_code == 302, back.text
        return str(back.headers["Location"])


def led_to(page: httpx.Response) -> str:
    """Where one of our pages leads by itself."""
    [url] = re.findall(r'http-equiv="refresh" content="0;url=([^"]+)"', page.text)
    return html.unescape(url)
