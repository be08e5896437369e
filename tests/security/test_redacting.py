"""What looks like a secret is taken out, and what does not is left."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synvirt.redacting import GONE, redacted, redacted_text
from synvirt.repository.keys import recovery_text

SECRET = "Zq8vexed-otter"


SHAPES = [
    f"Cookie: __Host-synvirt={SECRET}",
    f"Set-Cookie: session={SECRET}; Path=/",
    f'{{"cookie": "__Host-synvirt={SECRET}"}}',
    f"X-Auth-Token: {SECRET}",
    f"X-Api-Key: {SECRET}",
    f"x-amz-security-token: {SECRET}",
    f"Proxy-Authorization: Basic {SECRET}",
    f"Authorization: PVEAPIToken=root@pam!x={SECRET}",
    f"PVEAuthCookie={SECRET}",
    f"CSRFPreventionToken: {SECRET}",
    f"vmware-api-session-id: {SECRET}",
    f'vmware_soap_session="{SECRET}"',
    f"OpaqueRef session_id={SECRET}",
    f"passphrase: {SECRET}",
    f"passwd={SECRET}",
    f"pwd={SECRET}",
    f"Password: '{SECRET}'",
    f'password = "{SECRET}"',
    f"password is {SECRET}1",
    f"PGPASSWORD={SECRET}",
    f"api_key={SECRET}",
    f"apikey={SECRET}",
    f"api-key: {SECRET}",
    f"access_token={SECRET}",
    f'"refresh_token": "{SECRET}"',
    f"id_token={SECRET}",
    f"client_secret={SECRET}",
    f"private_key={SECRET}",
    f"secret: {SECRET}",
    f"secret-key: {SECRET}",
    f"<password>{SECRET}</password>",
    f"<adminPassword>{SECRET}</adminPassword>",
    f'<ns:Password Type="x">{SECRET}</ns:Password>',
    f"<secret value='{SECRET}'/>",
    f"curl -u user:{SECRET} https://x",
    f"sshpass -p {SECRET} ssh x",
    f"mount -o username=x,password={SECRET}",
    f"svt_{SECRET}{SECRET}",
    f"aws_secret_access_key = {SECRET}",
    f"/a?sig={SECRET}&se=1",
    f"https://x.blob.example/a?sv=1&sig={SECRET}",
    f"/a?X-Goog-Signature={SECRET}",
    f"/a?AWSAccessKeyId=x&Signature={SECRET}",
    f"GET /login/oidc/callback?code={SECRET}&state=y",
    f"GET /login/oidc/callback?code=x&state={SECRET}",
    f"password:\n  {SECRET}",
    f'\\"password\\": \\"{SECRET}\\"',
    f"password%3D{SECRET}",
    f"-----BEGIN OPENSSH PRIVATE KEY-----\n{SECRET}\n",
    f"-----BEGIN ENCRYPTED PRIVATE KEY-----\n{SECRET}",
    f"qemu+ssh://root:{SECRET}@host/system",
    f"ftp://a:{SECRET}@b",
    f"rbd:pool/x:id=admin:key={SECRET}",
    f"--password={SECRET}",
    f"LoginToken('{SECRET}')",
    f"synvirt-key-1:scrypt:1:8:1:x:{SECRET}",
    f"SYNVIRT_PASSPHRASE={SECRET}",
    f"SYNVIRT_PEER_PASSWORD={SECRET}",
    f"iscsi chap-secret={SECRET}",
    f"Authorization: NTLM {SECRET}",
    f"authorization: Negotiate {SECRET}==",
    f"Proxy-Authorization: Kerberos {SECRET}",
    f"Authorization: Token {SECRET}",
    f"curl -H 'Authorization: NTLM {SECRET}' https://x",
    f"{{'Authorization': 'NTLM {SECRET}'}}",
    f"('Authorization', 'Negotiate {SECRET}')",
    f"(b'authorization', b'NTLM {SECRET}')",
    f'Authorization: Digest username="x", realm="y", response="{SECRET}"',
    f"WWW-Authenticate: Negotiate {SECRET}{SECRET}",
    f"['/usr/bin/sshpass', '-p', '{SECRET}', 'ssh']",
    f'execve("/usr/bin/sshpass", ["sshpass", "-p{SECRET}"])',
    f'["curl", "-u", "user:{SECRET}"]',
    f"curl --user=admin:{SECRET}",
    f"curl -u 'admin:a b {SECRET}' https://x",
    f"sshpass -p 'a b {SECRET}' ssh x",
    f"smbclient -U 'user%{SECRET}'",
    f"smbclient -U user%{SECRET}",
    f"['smbclient', '-U', 'user%{SECRET}']",
    f"['tool', '--password', '{SECRET}']",
    f'["tool","--api-token","{SECRET}"]',
    f"args=('x', '--secret-key', '{SECRET}')",
    f"argv [b'--password', b'{SECRET}']",
    f'\\"argv\\": [\\"--password\\", \\"{SECRET}\\"]',
    f'["X-Auth-Token", "{SECRET}"]',
]


@pytest.mark.parametrize("text", SHAPES)
def test_more_than_51_shapes_of_secrets_go(text: str) -> None:
    assert SECRET not in redacted_text(text)
    assert SECRET not in json.dumps(redacted({"event": text, "lines": [text]}))


@pytest.mark.parametrize(
    "items",
    [
        ["sshpass", "-p", SECRET, "ssh"],
        ["/usr/bin/sshpass", "-v", "-p", SECRET],
        ["tool", "--password", SECRET],
        ["curl", "-u", f"user:{SECRET}"],
        ["smbclient", "-U", f"user%{SECRET}"],
        ["Authorization", f"NTLM {SECRET}"],
        ("X-Auth-Token", SECRET),
    ],
)
def test_what_an_item_of_a_list_announces_goes(items: list[str]) -> None:
    """The arguments of a program, or a header, in the fields of a log line."""
    shown = redacted({"argv": items, "in": [items]})
    assert SECRET not in json.dumps(shown)
    assert shown["argv"][0] == items[0]


@pytest.mark.parametrize(
    "items",
    [
        ["qemu-img", "-u", "base.qcow2"],
        ["tool", "--password-file", "/etc/x"],
        ["--no-password", "--x"],
        ["-p", "22"],
        ["a token"],
    ],
)
def test_what_no_item_of_a_list_announces_stays(items: list[str]) -> None:
    assert redacted(items) == items


def test_a_recovery_key_goes() -> None:
    key = recovery_text(bytes(range(32)))
    assert key not in redacted_text(f"the line was {key}, and more")


@pytest.mark.parametrize(
    "text",
    [
        f"postgresql://synvirt:{SECRET}@db.example/synvirt",
        f"cannot read https://user:{SECRET}@nas.example/a.ova: 403",
        f"https://bucket.example/a.ova?X-Amz-Signature={SECRET}&X-Amz-Date=1",
        f"s3://bucket/key?token={SECRET}",
        f"smb://mover:{SECRET}@share/x",
        f"Authorization: Basic {SECRET}",
        f"authorization: bearer {SECRET}",
        f"password={SECRET}",
        f"SYNVIRT_REMOTE_PASSWORD={SECRET}",
        f'{{"password": "{SECRET}"}}',
        f"{{'secret_access_key': '{SECRET}'}}",
        f"--source-password {SECRET}",
        f"-----BEGIN RSA PRIVATE KEY-----\n{SECRET}\n-----END RSA PRIVATE KEY-----",
        f"-----BEGIN PRIVATE KEY-----\n{SECRET}",
        json.dumps({"event": json.dumps({"password": SECRET, "x": 1})}),
        json.dumps({"xml": f'<graphics passwd="{SECRET}"/>'}),
        f"https://user:p@ss:{SECRET}@nas.example/",
        f"The first start made the user admin with the password {SECRET}: it is not shown again",
    ],
)
def test_secrets_in_text_go(text: str) -> None:
    assert SECRET not in redacted_text(text)


@pytest.mark.parametrize(
    "text",
    [
        "no service answers at /var/lib/synvirt/synvirt.sock: No such file or directory",
        "qemu:///embed?root=/var/lib/synvirt/libvirt",
        "disk key 2000: 4 KiB of 10 GiB",
        "https://vcenter.example/sdk answered 503",
        "the source platform refused the credentials",
        "/var/lib/synvirt/keyring/migrator.key: mode 0600",
        "user mover@vsphere.local",
        "they negotiate the protocol, and TLS is off",
        "rsync -u vms/a.img b",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redacted_text(text) == text


def test_secrets_of_fields_go_by_their_name() -> None:
    reported = redacted(
        {
            "credentials": {"user": "x", "password": SECRET},
            "options": {"sessionToken": SECRET, "fingerprint_sha256": "1A:77"},
            "disks": [{"key": "2000", "private_key": SECRET}],
            "password": None,
            "count": 3,
            "client_secret_file": "/etc/synvirt/oidc",
        }
    )
    assert SECRET not in json.dumps(reported)
    assert reported["disks"][0]["key"] == "2000"
    assert reported["options"]["fingerprint_sha256"] == "1A:77"
    assert (reported["password"], reported["count"]) == (None, 3)
    assert reported["client_secret_file"] == "/etc/synvirt/oidc", "where it is, is no secret"


def test_what_is_known_to_be_secret_goes_wherever_it_stands() -> None:
    assert redacted_text(f"the login as {SECRET!r} failed", known=(SECRET,)) == f"the login as '{GONE}' failed"


@given(st.text(alphabet=st.sampled_from("ab:/@?=&'\" \n{}-password"), max_size=200))
def test_it_takes_any_text_and_twice_is_as_once(text: str) -> None:
    once = redacted_text(text)
    assert redacted_text(once).count(GONE) >= once.count(GONE)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "piece",
    [
        "password=",
        "a://",
        "://a@",
        "-----BEGIN PRIVATE KEY-----",
        "https://a?",
        "-token",
        "token.",
        "https://",
        "token='",
        "--a",
        "authorization: x",
        'authorization="',
        "'token','",
        " -u a:",
        "sshpass -p",
    ],
)
def test_a_hostile_line_does_not_keep_it_busy(piece: str) -> None:
    redacted_text(piece * (200_000 // len(piece)))


def test_the_password_of_the_first_start_and_tokens_go() -> None:
    assert redacted_text("it was abcde-fghjk-mnpqr-st234 once") == f"it was {GONE} once"
    assert "svt_" not in redacted_text("curl -H svt_0123456789abcdefghijklmn")
    assert redacted_text("the password of admin is set") == "the password of admin is set"
