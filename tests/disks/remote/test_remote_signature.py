"""S3's signature, against botocore's own for any key, query and secret."""

from datetime import UTC, datetime
from urllib.parse import quote

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from hypothesis import given
from hypothesis import strategies as st

from synvirt.remote.s3 import signature
from synvirt.remote.urls import Url
from tests.cases import cases

TEXT = st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=30)
KEYS = st.text(st.sampled_from("ABCabc019/+="), min_size=1, max_size=40)


@given(key=TEXT, query=st.dictionaries(TEXT.filter(bool), TEXT, max_size=3), access=KEYS, secret=KEYS, token=KEYS | st.just(""))
@cases(200)
def test_it_is_that_of_botocore(key: str, query: dict[str, str], access: str, secret: str, token: str) -> None:
    written = "&".join(f"{quote(name, safe='-_.~')}={quote(value, safe='-_.~')}" for name, value in query.items())
    url = Url("https", "bucket.s3.eu-west-1.amazonaws.com", 443, "/" + quote(key, safe="/-_.~"), written)
    request = AWSRequest(method="GET", url=f"https://{url.host}{url.target}")
    auth = S3SigV4Auth(Credentials(access, secret, token or None), "s3", "eu-west-1")
    auth.add_auth(request)
    at = datetime.strptime(request.context["timestamp"], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    ours = signature(url, access_key=access, secret=secret, token=token, region="eu-west-1", at=at)
    assert ours["authorization"] == request.headers["Authorization"]
