# SPDX-License-Identifier: Apache-2.0
"""Google's files of credentials, as gcloud writes them (source: "How Application Default Credentials works";
AIP-4110 to AIP-4117).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

from infranetes.providers.cloud.gcp.identities import (
    HOUR,
    AccountKey,
    AuthorizedUser,
    AwsToken,
    ExternalAccount,
    FileToken,
    Identity,
    Impersonated,
    UrlToken,
)
from infranetes.providers.cloud.gcp.token_requests import broken

_MAX_FILE = 64 * 1024
_GOOGLE = r"https://(?:[a-z0-9-]+\.)+googleapis\.com"
_EXCHANGE = re.compile(_GOOGLE + r"/v1/token")
_IMPERSONATION = re.compile(
    _GOOGLE + r"/v1/projects/-/serviceAccounts/([A-Za-z0-9@._-]{1,254}):generateAccessToken"
)
_AUDIENCE = re.compile(
    r"//iam\.googleapis\.com/projects/[0-9]+/locations/global/workloadIdentityPools/[^/\s]+/providers/[^/\s]+"
)
_DELEGATE = re.compile(r"(?:projects/-/serviceAccounts/)?([A-Za-z0-9@._-]{1,254})")
_AWS = re.compile(r"https://sts\.\{region\}\.(amazonaws\.com(?:\.cn)?)/?\?[\w=&.-]+")
_URL = re.compile(r"https?://[^\s/@]+(?:/\S*)?")
_LONGEST = 12 * HOUR

_Table: TypeAlias = Mapping[str, object]


def _thd_read(path: Path, named_by: str) -> Identity:
    """Read a file.

    :param named_by: what names it, for people.
    :raise CloudError: it can't be used; says why, without its content.
    """
    where = f"{named_by} {path}".strip()
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777
            content = file.read(_MAX_FILE)
    except OSError as error:
        raise broken(f"{where} can't be read: {error.strerror}") from None
    try:
        table = json.loads(content)
    except ValueError:
        table = None
    if not isinstance(table, dict):
        raise broken(f"{where} is no file of credentials: it has no JSON object")
    try:
        found = _identity(table)
    except _Wrong as error:
        raise broken(f"{where}: {error}") from None
    _check_mode(where, mode, found)
    return found


def _check_mode(where: str, mode: int, found: Identity) -> None:
    """Check a file's mode. :raise CloudError: other users may read the secret in it, or change a file without
    a secret."""
    if mode & 0o077 and _holds_secret(found):
        raise broken(f"{where} may be read by others (mode {mode:04o}): chmod 600 it")
    if mode & 0o022:
        raise broken(f"{where} may be changed by others (mode {mode:04o}): chmod 644 it")


def _holds_secret(found: Identity) -> bool:
    match found:
        case Impersonated():
            return _holds_secret(found.source)
        case ExternalAccount(subject=UrlToken() as subject):
            return any(name.lower() == "authorization" for name in subject.headers)
        case ExternalAccount():
            return False
    return True


class _Wrong(Exception):
    """The fault of a credentials file."""


def _identity(table: _Table) -> Identity:
    kind = table.get("type")
    if kind == "impersonated_service_account":
        source = table.get("source_credentials")
        if not isinstance(source, dict) or source.get("type") == kind:
            raise _Wrong("source_credentials of another type are expected")
        return _impersonated(table, _identity(source))
    if kind == "service_account":
        key = _text(table, "private_key")
        if "PRIVATE KEY---" not in key:
            raise _Wrong("private_key is no key")
        return AccountKey(_text(table, "client_email"), key)
    if kind == "authorized_user":
        return AuthorizedUser(
            _text(table, "client_id"), _text(table, "client_secret"), _text(table, "refresh_token")
        )
    if kind == "external_account":
        return _external(table)
    raise _Wrong(
        "its type is none of service_account, authorized_user, external_account and "
        "impersonated_service_account"
    )


def _impersonated(table: _Table, source: Identity) -> Impersonated:
    url = _text(table, "service_account_impersonation_url")
    found = _IMPERSONATION.fullmatch(url)
    if found is None:
        raise _Wrong("service_account_impersonation_url is not one of Google's")
    delegates = table.get("delegates") or []
    if not isinstance(delegates, list):
        raise _Wrong("delegates is no list")
    accounts = [_DELEGATE.fullmatch(str(each)) for each in delegates]
    options = table.get("service_account_impersonation")
    seconds = options.get("token_lifetime_seconds", HOUR) if isinstance(options, dict) else HOUR
    if type(seconds) is not int or not 600 <= seconds <= _LONGEST:
        raise _Wrong("token_lifetime_seconds is not between 600 and 43200")
    names = tuple(each[1] for each in accounts if each is not None)
    if len(names) != len(accounts):
        raise _Wrong("delegates are no service accounts")
    return Impersonated(found[1], url, source, names, seconds)


def _external(table: _Table) -> Identity:
    audience = _text(table, "audience")
    if not _AUDIENCE.fullmatch(audience):
        raise _Wrong(
            "audience is no provider of a workload identity pool; pools of a workforce are for people"
        )
    exchange = _text(table, "token_url")
    if not _EXCHANGE.fullmatch(exchange):
        raise _Wrong("token_url is not one of Google's")
    source = table.get("credential_source")
    if not isinstance(source, dict):
        raise _Wrong("credential_source is missing")
    found = ExternalAccount(audience, _text(table, "subject_token_type"), exchange, _subject(source))
    return _impersonated(table, found) if table.get("service_account_impersonation_url") else found


def _subject(source: _Table) -> FileToken | UrlToken | AwsToken:
    if "executable" in source:
        raise _Wrong(
            "credential_source.executable is refused: the daemon runs no programs for it as root; have the "
            "program write the token into a file, and name that as credential_source.file"
        )
    if "environment_id" in source:
        url = _text(source, "regional_cred_verification_url")
        if source["environment_id"] != "aws1" or not _AWS.fullmatch(url):
            raise _Wrong("credential_source is not AWS' of version 1")
        return AwsToken(url)
    if "file" in source:
        return FileToken(_text(source, "file"), _field(source))
    if "url" in source:
        url = _text(source, "url")
        if not _URL.fullmatch(url):
            raise _Wrong("credential_source.url is no URL")
        return UrlToken(url, _url_headers(source), _field(source))
    raise _Wrong("credential_source has neither file, url nor environment_id; certificates are not supported")


def _url_headers(source: _Table) -> Mapping[str, str]:
    headers = source.get("headers") or {}
    fits = isinstance(headers, dict) and all(
        isinstance(value, str) and re.fullmatch(r"[A-Za-z0-9-]+", name) and value.isprintable()
        for name, value in headers.items()
    )
    if not isinstance(headers, dict) or not fits:
        raise _Wrong("credential_source.headers are no headers")
    return headers


def _field(source: _Table) -> str:
    """Return the field of JSON that the token is in; "": it is the whole content."""
    format = source.get("format") or {}
    if not isinstance(format, dict) or format.get("type", "text") not in ("text", "json"):
        raise _Wrong("credential_source.format is neither text nor json")
    return _text(format, "subject_token_field_name") if format.get("type") == "json" else ""


def _text(table: _Table, key: str) -> str:
    value = table.get(key)
    if not isinstance(value, str) or not value:
        raise _Wrong(f"{key} is missing")
    return value
