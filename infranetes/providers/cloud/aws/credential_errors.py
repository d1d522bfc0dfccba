# SPDX-License-Identifier: Apache-2.0
"""The meanings of botocore's errors when it finds or renews credentials.

Sources: botocore's `exceptions`; the STS API reference, "Common Errors" and "AssumeRoleWithWebIdentity".
"""

from __future__ import annotations

from typing import Protocol, TypedDict, cast

from infranetes.providers.cloud.calls.errors import message_of
from infranetes.providers.cloud.interface import CloudError, ErrorKind

# Codes of STS and of the SSO portal. An expired web identity token may pass: its issuer writes a new one.
_PASSING = frozenset(
    (
        "IDPCommunicationError",
        "ExpiredTokenException",
        "ExpiredToken",
        "Throttling",
        "ThrottlingException",
        "SlowDown",
        "RequestLimitExceeded",
        "TooManyRequestsException",
        "RequestTimeout",
        "InternalFailure",
        "ServiceUnavailable",
    )
)
_HINTS = {
    "ProfileNotFound": "correct providers.aws.profile (or AWS_PROFILE), or add the profile to AWS' files",
    "ConfigParseError": "correct AWS' files",
    "InvalidConfigError": "correct the profile",
    "InfiniteLoopConfigError": "correct the profile",
    "UnknownCredentialError": "correct the profile",
    "PartialCredentialsError": "give all of them",
    "UnauthorizedSSOTokenError": "run `aws sso login` as the daemon's user",
    "SSOTokenLoadError": "run `aws sso login` as the daemon's user",
    "TokenRetrievalError": "unless it passes, run `aws sso login` as the daemon's user",
    "MetadataRetrievalError": "",
    "CredentialRetrievalError": "",
}
_PASSING_ERRORS = ("MetadataRetrievalError", "CredentialRetrievalError", "TokenRetrievalError")


class _Answer(TypedDict, total=False):
    Error: dict[str, str]
    ResponseMetadata: dict[str, object]


class _ClientError(Protocol):
    """A `botocore.exceptions.ClientError`: a service's refusal."""

    response: _Answer


def broken(words: str) -> CloudError:
    """Return the error for credentials that stay broken until an administrator repairs them."""
    return CloudError(ErrorKind.CREDENTIALS, f"no credentials: {words}")


def classify(error: Exception) -> CloudError:
    """Classify an error that was met while keys were found or renewed."""
    from botocore import exceptions

    if isinstance(error, CloudError):
        return error
    if isinstance(error, exceptions.ClientError):
        return _of_answer(cast(_ClientError, error))
    if isinstance(error, exceptions.ConnectionError | exceptions.HTTPClientError):
        return _passing(f"their source does not answer: {message_of(error)}")
    name = type(error).__name__
    if isinstance(error, exceptions.BotoCoreError):
        words = ": ".join(filter(None, (message_of(error).rstrip("."), _HINTS.get(name, ""))))
        return _passing(words) if name in _PASSING_ERRORS else broken(words)
    if isinstance(error, OSError):
        return broken(f"{error.filename or 'a file'} can't be read: {error.strerror}")
    if isinstance(error, RuntimeError):  # botocore's, when new keys have already expired
        return _passing(message_of(error))
    # The error's own message is left out: it may quote what botocore could not read.
    return broken(f"their source gave an invalid answer ({name})")


def _of_answer(error: _ClientError) -> CloudError:
    refusal = error.response.get("Error", {})
    code, words = refusal.get("Code", ""), " ".join(refusal.get("Message", "").split())
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    message = f"{code}: {words}"[:400]
    if code in _PASSING or (isinstance(status, int) and status >= 500):
        return _passing(message)
    return broken(message)


def _passing(words: str) -> CloudError:
    return CloudError(ErrorKind.TRANSIENT, f"no credentials for now: {words}")
