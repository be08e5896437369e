"""Trust by TLS: the files with certificates for libvirt and libnbd. Blocking code.

    pinned   only that certificate, checked in the handshake itself: an attacker in between could let a separate check pass
    else     by its authority: credentials.ca_certificate; any, where verify_tls is false

Both must also be issued for the endpoint's host (libvirt.org/kbase/tlscerts.html). QEMU may serve disks with a certificate of
its own: it is trusted by its authority, if that is given; else by the same pin.
"""

from dataclasses import dataclass
from pathlib import Path

from synvirt.errors import AuthFailed, SourceUnreachable
from synvirt.live.form import Place
from synvirt.live.libvirt.form import Login, Options
from synvirt.transport import tls


@dataclass(frozen=True, slots=True)
class Pki:
    """The trust for one host by qemu+tls."""

    place: Place
    login: Login
    options: Options

    @property
    def checked(self) -> bool:
        return self.options.verify_tls or self._pinned

    @property
    def query(self) -> str:
        """For libvirt's URI. A pinned certificate is not an authority's, and may be the only trusted one; libvirt must not
        mind."""
        return "&no_sanity=1" + ("" if self.checked else "&no_verify=1")

    @property
    def wanted(self) -> str:
        """The requirement for libvirt's certificate, as a hint."""
        return self._must(self.place.host, pinned=self._pinned)

    @property
    def wanted_of_disks(self) -> str:
        """The requirement for the certificate of disks, as a hint."""
        return self._must(self.options.nbd_host(self.place.host), pinned=self._pinned and not self._has_authority)

    def write(self, folder: Path) -> Path:
        """Writes the files, under libvirt's names and also under libnbd's; the folder. Neither starts without an authority,
        even if it is not checked. AuthFailed, SourceUnreachable."""
        authority, key = self.login.ca_certificate, self.login.client_key
        if authority is None and not self._pinned and self.options.verify_tls:
            raise AuthFailed(
                f"the authority of the certificate of {self.place.host} is not given: credentials.ca_certificate is missing",
                hint="give it; or test the source, which shows the certificate, and pin it as options.fingerprint_sha256",
            )
        shown = self._shown() if self._pinned or authority is None else None
        folder.mkdir(mode=0o700, exist_ok=True)
        for names, content in (
            (("cacert.pem",), shown or authority),
            (("ca-cert.pem",), authority if self._has_authority else shown or authority),
            (("clientcert.pem", "client-cert.pem"), self.login.client_certificate),
            (("clientkey.pem", "client-key.pem"), key.get_secret_value() if key else None),
        ):
            for name in names if content else ():
                (folder / name).touch(mode=0o600)
                (folder / name).write_text(str(content))
        return folder

    @property
    def _pinned(self) -> bool:
        return self.options.fingerprint_sha256 is not None

    @property
    def _has_authority(self) -> bool:
        """Whether an authority is known that certificates are checked against."""
        return self.login.ca_certificate is not None and self.options.verify_tls

    def _must(self, host: str | None, *, pinned: bool) -> str:
        by = "be the pinned one" if pinned else "be signed by credentials.ca_certificate"
        return f"the certificate must {by}, and be made out to {host}"

    def _shown(self) -> str:
        """PEM of the host's certificate, if it is the pinned one or none is pinned."""
        host, port, pinned = self.place.host, self.place.port, self.options.fingerprint_sha256
        assert host is not None
        assert port is not None
        try:
            shown = tls.look(host, port)
        except OSError as error:
            raise SourceUnreachable(f"{host} shows no certificate on port {port}") from error
        if pinned is not None and shown.fingerprint != pinned:
            raise tls.certificate_changed(host, shown.fingerprint, pinned)
        return shown.pem
