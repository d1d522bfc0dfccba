# SPDX-License-Identifier: Apache-2.0
"""The issuers of tokens at Google: the token service, the Security Token Service, IAM's credentials of
service accounts, and the metadata server of the node; and another issuer, at a URL.

Requests and answers of two of the APIs are checked by Google's own descriptions. The token service has none;
it follows RFC 6749 and RFC 7523.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import attrs
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa

from tests.support.clouds import discovery
from tests.support.clouds.gce_resources import PROJECT
from tests.support.clouds.http_sites import Answer, Answering, ClosableSite

ACCOUNT = f"node@{PROJECT}.iam.gserviceaccount.com"
PERSON = "somebody@example.com"
AUDIENCE = "//iam.googleapis.com/projects/123456/locations/global/workloadIdentityPools/nodes/providers/ours"
POOL = "principal://iam.googleapis.com/projects/123456/locations/global/workloadIdentityPools/nodes/subject/"
COMPUTE = "https://www.googleapis.com/auth/compute"
PLATFORM = "https://www.googleapis.com/auth/cloud-platform"
IAM = "https://www.googleapis.com/auth/iam"
METADATA = "/computeMetadata/v1/instance/service-accounts/default/token"
OIDC = "/oidc"
SIGN_IN = "hush-refresh"
VERIFICATION = "https://sts.{region}.amazonaws.com?Action=GetCallerIdentity&Version=2011-06-15"
_TOKEN, _EXCHANGE = "/token", "/v1/token"
_IMPERSONATION = re.compile("/v1/projects/-/serviceAccounts/([^/:]+):generateAccessToken")
_AUD = "https://oauth2.googleapis.com/token"
_ROLE = "arn:aws:sts::123456789012:assumed-role/node"
Json = dict[str, Any]


@attrs.frozen
class Holder:
    """The account of a token, and the token's scopes."""

    name: str
    scope: str


@lru_cache
def _key() -> rsa.RSAPrivateKey:
    """Return the service account's key, which is made once."""
    return rsa.generate_private_key(65537, 2048)


class GoogleIdentity:
    """One server for all of these, or a part of another server.

    :param issued: called with each new token.
    :ivar asked: the requested paths. :ivar forms: the forms that were sent.
    :ivar tokens: the issued tokens, with their holders.
    :ivar refusal: an answer that requests, or those for one path, get in place of their own.
    :ivar malformed: faults of requests and answers by Google's descriptions.
    :ivar seconds: how long tokens are valid.
    :ivar metadata_scope: the instance's scope; "": it has no account.
    :ivar subjects: valid tokens of another issuer, with their subjects. :ivar stale: those no longer valid.
    :ivar aws_keys: the secrets of AWS keys. :ivar impersonators: which accounts may impersonate which.
    :ivar sign_ins: valid refresh tokens. :ivar lifetimes: the lifetimes that were requested.
    """

    def __init__(self, issued: Callable[[str, Holder], None] = lambda token, holder: None) -> None:
        self._issued = issued
        self.asked: list[str] = []
        self.tokens: dict[str, Holder] = {}
        self.refusal: tuple[str, Answer] | None = None
        self.malformed: list[str] = []
        self.forms: list[Json] = []
        self.lifetimes: list[str] = []
        self.seconds = 3599
        self.metadata_scope = COMPUTE
        self.subjects: dict[str, str] = {}
        self.stale: set[str] = set()
        self.aws_keys: dict[str, str] = {}
        self.impersonators: set[tuple[str, str]] = set()
        self.sign_ins: set[str] = set()
        self._site = ClosableSite(Answering(self._serve, "application/json"))

    def prepare(self) -> None:
        """Do what takes long."""
        discovery.sts()
        discovery.iam_credentials()
        _key()

    def start(self, reactor: Any) -> None:
        """Listen."""
        self.prepare()
        self._port = reactor.listenTCP(0, self._site, interface="127.0.0.1")
        self.url = f"http://127.0.0.1:{self._port.getHost().port}"

    async def stop(self) -> None:
        """Stop listening."""
        await self._port.stopListening()
        await self._site.close_connections()

    @contextmanager
    def refusing(
        self, status: int = 503, body: bytes = b"", path: str = "", **headers: str
    ) -> Iterator[None]:
        """Return a context manager in whose block requests, or those for one path, get this answer."""
        self.refusal = (
            path,
            (status, body, *((name.replace("_", "-"), each) for name, each in headers.items())),
        )
        try:
            yield
        finally:
            self.refusal = None

    # ---- Files

    def key(self) -> Json:
        """Return a service account's key in Google's format."""
        private = _key().private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return {
            "type": "service_account",
            "project_id": PROJECT,
            "private_key": private.decode(),
            "client_email": ACCOUNT,
            "token_uri": _AUD,
        }

    def sign_in(self, refresh_token: str = SIGN_IN) -> Json:
        """Return what `gcloud auth application-default login` leaves."""
        return {
            "type": "authorized_user",
            "client_id": "id",
            "client_secret": "hush-client",
            "refresh_token": refresh_token,
            "universe_domain": "googleapis.com",
        }

    def external(self, source: Json, account: str = "", **more: Any) -> Json:
        """Return what `gcloud iam workload-identity-pools create-cred-config` writes.

        :param account: to impersonate."""
        aws = "environment_id" in source
        kind = (
            "urn:ietf:params:aws:token-type:aws4_request" if aws else "urn:ietf:params:oauth:token-type:jwt"
        )
        found = {
            "type": "external_account",
            "universe_domain": "googleapis.com",
            "audience": AUDIENCE,
            "subject_token_type": kind,
            "token_url": "https://sts.googleapis.com/v1/token",
            "credential_source": source,
            **more,
        }
        return (
            {**found, "service_account_impersonation_url": impersonation_url(account)} if account else found
        )

    def aws_source(self) -> Json:
        """Return the same command's `credential_source` for AWS."""
        metadata = "http://169.254.169.254/latest"
        return {
            "environment_id": "aws1",
            "region_url": f"{metadata}/meta-data/placement/availability-zone",
            "url": f"{metadata}/meta-data/iam/security-credentials",
            "imdsv2_session_token_url": f"{metadata}/api/token",
            "regional_cred_verification_url": VERIFICATION,
        }

    # ---- Answers

    async def _serve(self, request: Any) -> Answer:
        return self.answer(request, request.content.read())

    def answer(self, request: Any, content: bytes) -> Answer:
        """Return the answer to a request."""
        path = request.path.decode()
        self.asked.append(path)
        if self.refusal is not None and self.refusal[0] in ("", path):
            return self.refusal[1]
        if path == METADATA:
            return self._metadata(request)
        if path == OIDC:
            return self._oidc(request)
        if request.method != b"POST":
            return 404, b"Not Found"
        if found := _IMPERSONATION.fullmatch(path):
            self.forms.append(json.loads(content))
            return self._impersonate(request, found[1], self.forms[-1])
        form = dict(parse_qsl(content.decode(), strict_parsing=True))
        self.forms.append(form)
        if path == _EXCHANGE:
            return self._exchange(request, form)
        return self._grant(form) if path == _TOKEN else (404, b"Not Found")

    def _give(self, name: str, scope: str, seconds: int = 0) -> Json:
        token = secrets.token_hex(16)
        self.tokens[token] = Holder(name, scope)
        self._issued(token, self.tokens[token])
        return {"access_token": token, "expires_in": seconds or self.seconds, "token_type": "Bearer"}

    def _metadata(self, request: Any) -> Answer:
        if request.getHeader("Metadata-Flavor") != "Google":
            return 403, b"{}"
        if not self.metadata_scope:
            return 404, b"The requested URL was not found on this server."
        return _ok(self._give(ACCOUNT, self.metadata_scope))

    def _oidc(self, request: Any) -> Answer:
        if request.getHeader("Authorization") != "Bearer hush-url":
            return 401, b"{}"
        return _ok({"value": next(iter(self.subjects))})

    def _grant(self, form: Json) -> Answer:
        if form["grant_type"] == "refresh_token":
            if form["refresh_token"] not in self.sign_ins or form["client_secret"] != "hush-client":
                return _refused(
                    "invalid_grant", f"Token {form['refresh_token']} has been expired or revoked."
                )
            return _ok(self._give(PERSON, PLATFORM))
        claims = _claims(form)
        if claims is None or claims["iss"] != ACCOUNT or claims["aud"] != _AUD:
            return _refused("invalid_grant", "Invalid JWT Signature.")
        if not time.time() - 60 < claims["iat"] < claims["exp"] <= claims["iat"] + 3600:
            return _refused("invalid_grant", "Invalid JWT: Token must be a short-lived token")
        return _ok(self._give(ACCOUNT, claims["scope"]))

    def _exchange(self, request: Any, form: Json) -> Answer:
        assert request.getHeader("Authorization") is None
        body = {_camel(name): value for name, value in form.items()}
        subject = form["subject_token"]
        if form["audience"] != AUDIENCE:
            return _refused("invalid_target", "The target service indicated by the audience is invalid.")
        if subject in self.stale:
            return _refused("invalid_grant", "ID Token issued at 1749625771 is stale to sign-in.")
        by_aws = form["subject_token_type"].endswith("aws4_request")
        name = self._aws(unquote(subject)) if by_aws else self.subjects.get(subject, "")
        if not name:
            return _refused("invalid_grant", f"The credential {subject} can't be verified")
        said = self._give(f"{POOL}{name}", form["scope"])
        said["issued_token_type"] = "urn:ietf:params:oauth:token-type:access_token"
        self.malformed += discovery.sts().wrong("POST", _EXCHANGE[1:], {}, body, said)
        return _ok(said)

    def _aws(self, subject: str) -> str:
        """Return the identity of a signed request that Google would send to AWS; "": AWS would refuse it."""
        sent = json.loads(subject)
        headers = {each["key"].lower(): each["value"] for each in sent["headers"]}
        scheme, fields = headers["authorization"].split(" ", 1)
        found = dict(each.split("=", 1) for each in fields.split(", "))
        signed = found["SignedHeaders"].split(";")
        key, _, region, service, _ = found["Credential"].split("/")
        host = f"sts.{region}.amazonaws.com"
        right = (
            scheme == "AWS4-HMAC-SHA256"
            and {"host", "x-amz-date"} <= set(signed)
            and sent["method"] == "POST"
            and sent["url"] == VERIFICATION.replace("{region}", region)
            and (service, headers["host"], headers["x-goog-cloud-target-resource"]) == ("sts", host, AUDIENCE)
        )
        if not right or found["Signature"] != self._signature(
            key, region, {name: headers[name] for name in signed}
        ):
            return ""
        return f"{_ROLE}/{key}"

    def _signature(self, key: str, region: str, headers: Json) -> str:
        """Source: AWS, "Create a signed AWS API request". :param headers: that are signed."""
        names = sorted(headers)
        lines = "".join(f"{name}:{headers[name].strip()}\n" for name in names)
        query = urlsplit(VERIFICATION).query
        canonical = "\n".join(["POST", "/", query, lines, ";".join(names), hashlib.sha256(b"").hexdigest()])
        request = AWSRequest("POST", "https://unused/")
        request.context["timestamp"] = headers["x-amz-date"]
        auth = SigV4Auth(Credentials(key, self.aws_keys.get(key, secrets.token_hex(8))), "sts", region)
        return str(auth.signature(auth.string_to_sign(request, canonical), request))

    def _impersonate(self, request: Any, account: str, body: Json) -> Answer:
        holder = self.tokens.get(str(request.getHeader("Authorization")).removeprefix("Bearer "))
        if holder is None:
            return _error(401, "UNAUTHENTICATED", "Request had invalid authentication credentials.")
        if holder.scope not in (PLATFORM, IAM):
            words = "Request had insufficient authentication scopes."
            return _error(403, "PERMISSION_DENIED", words)
        between = [each.rpartition("/")[2] for each in body.get("delegates") or ()]
        chain = [holder.name, *between, account]
        if not self.impersonators.issuperset(pairwise(chain)):
            words = (
                "Permission 'iam.serviceAccounts.getAccessToken' denied on resource (or it may not exist)."
            )
            return _error(403, "PERMISSION_DENIED", words)
        given = self._give(account, " ".join(body["scope"]))
        self.lifetimes.append(body["lifetime"])
        end = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 3600))
        said = {"accessToken": given["access_token"], "expireTime": end}
        path = f"v1/projects/-/serviceAccounts/{account}:generateAccessToken"
        sent = {
            name: each for name, each in body.items() if each is not None
        }  # which is as if it were absent
        self.malformed += discovery.iam_credentials().wrong("POST", path, {}, sent, said)
        return _ok(said)


def impersonation_url(account: str) -> str:
    """Return the URL at which an account's tokens are requested."""
    host = "https://iamcredentials.googleapis.com"
    return f"{host}/v1/projects/-/serviceAccounts/{account}:generateAccessToken"


def write(file: Path, content: Json, mode: int = 0o600) -> Path:
    """Write a file of credentials."""
    file.touch(mode=0o600)
    file.write_text(json.dumps(content))
    file.chmod(mode)
    return file


def _ok(said: Json) -> Answer:
    return 200, json.dumps(said).encode()


def _refused(code: str, words: str) -> Answer:
    return 400, json.dumps({"error": code, "error_description": words}).encode()


def _error(status: int, code: str, words: str) -> Answer:
    said = {"error": {"code": status, "message": words, "status": code}}
    return status, json.dumps(said).encode()


def _camel(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(each.title() for each in others)


def _claims(form: Json) -> Json | None:
    """Return the claims signed with our service account's key (RFC 7523); None: it is not such a grant."""
    if form["grant_type"] != "urn:ietf:params:oauth:grant-type:jwt-bearer":
        return None
    try:
        head, claims, signature = form["assertion"].split(".")
        _key().public_key().verify(
            _decoded(signature), f"{head}.{claims}".encode(), padding.PKCS1v15(), hashes.SHA256()
        )
        found: Json = json.loads(_decoded(claims))
        return found
    except Exception:
        return None


def _decoded(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
