# SPDX-License-Identifier: Apache-2.0
"""Other issuers' tokens, which Google's Security Token Service takes for its own.

For AWS, the token is a signed `GetCallerIdentity` request, which Google sends to find out whose it is.
botocore finds the keys, as for the AWS provider, and signs the request.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Protocol
from urllib.parse import quote, urlsplit

from infranetes.providers.cloud.gcp.identities import AwsToken, ExternalAccount, FileToken, UrlToken
from infranetes.providers.cloud.gcp.token_requests import MAX_TOKEN, Service, TokenRequests, broken, passing
from infranetes.providers.cloud.interface import CloudError

_TARGET = "x-goog-cloud-target-resource"


def _thd_subject_token(account: ExternalAccount, ask: TokenRequests) -> str:
    """Get a token in a thread. :raise CloudError: there is none; says whether that may pass."""
    match account.subject:
        case FileToken() as file:
            return _text(_thd_read(file.path), file.field, file.path)
        case UrlToken() as there:
            return _thd_from_url(there, ask)
        case AwsToken() as aws:
            return _thd_signed(aws, account.audience, ask.timeout)


def _thd_read(path: str) -> bytes:
    try:
        with Path(path).open("rb") as file:
            content = file.read(MAX_TOKEN + 1)
    except OSError as error:
        raise broken(f"the token {path} can't be read: {error.strerror}") from None
    if len(content) > MAX_TOKEN:
        raise broken(f"the token {path} has more than {MAX_TOKEN} bytes")
    return content


def _thd_from_url(there: UrlToken, ask: TokenRequests) -> str:
    parts = urlsplit(there.url)
    name = f"{parts.scheme}://{parts.netloc}"  # the rest of the URL may be secret
    service = Service(
        name,
        there.url,
        "correct credential_source",
        is_remote=parts.scheme == "https",  # a metadata service is reached without a proxy
    )
    return _text(ask._thd_get(service, there.headers), there.field, name)


def _text(content: bytes, field: str, where: str) -> str:
    """Take a token out of what a file or server has. :param field: of JSON; "": it is the whole content."""
    text: object = content.decode(errors="replace").strip()
    if field:
        try:
            found = json.loads(str(text))
        except ValueError:
            found = None
        text = found.get(field) if isinstance(found, dict) else None
    if not isinstance(text, str) or not text or len(text) > MAX_TOKEN:
        # The file may have been read while it was being written, so this may pass.
        raise passing(f"{where} has no token{f' in its field {field}' if field else ''}")
    if not text.isascii() or not text.isprintable():
        raise broken(f"{where} has a token of more than one line")
    return text


class _Session(Protocol):
    """The part of botocore's session that is used here."""

    def get_config_variable(self, name: str) -> str | None: ...


def _thd_signed(aws: AwsToken, audience: str, timeout: float) -> str:
    """Sign the request that tells which role this machine has at AWS."""
    try:
        from botocore.auth import SigV4Auth
        from botocore.awsrequest import AWSRequest
        from botocore.credentials import Credentials as BotocoreKeys

        # Imported here because botocore is optional.
        from infranetes.providers.cloud.aws.credentials import Credentials
    except ImportError:
        raise broken(
            "AWS' part of the federation needs botocore, which is not installed: apt-get install "
            "python3-botocore, or pip install 'infranetes[aws]'"
        ) from None
    region = _thd_region()
    try:
        keys = Credentials("", "", "", region, timeout)._thd_now()
    except CloudError as error:
        raise CloudError(error.kind, f"AWS, for Google: {error}", error.retry_after) from error
    url = aws.verification.replace("{region}", region)
    # Google recommends signing its own header too, so that the token is of no use for any other pool.
    request = AWSRequest("POST", url, headers={"host": urlsplit(url).netloc, _TARGET: audience})
    SigV4Auth(BotocoreKeys(keys.access_key, keys.secret_key, keys.token), "sts", region).add_auth(request)
    signed = {
        "url": url,
        "method": "POST",
        "headers": [{"key": name, "value": value} for name, value in _as_described(request.headers)],
    }
    return quote(json.dumps(signed))


def _as_described(headers: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield headers with their names as Google describes them."""
    for name, value in headers.items():
        yield name if name == "Authorization" else name.lower(), str(value)


def _thd_region() -> str:
    """Return the region whose STS is asked: the one that AWS' tools are configured with, or else the
    instance's own."""
    from botocore.exceptions import BotoCoreError
    from botocore.session import Session
    from botocore.utils import IMDSRegionProvider

    make: Callable[[], _Session] = Session
    session = make()
    try:
        found = os.environ.get("AWS_REGION") or session.get_config_variable("region")
        region = found or IMDSRegionProvider(session).provide()
    except BotoCoreError as error:
        raise broken(f"AWS, for Google: {type(error).__name__}: correct AWS' files") from error
    if not region:
        raise passing(
            "AWS, for Google: the metadata service of this instance does not tell its region; if this is no "
            "instance of EC2, set AWS_REGION in the daemon's environment"
        )
    return str(region)
