# SPDX-License-Identifier: Apache-2.0
"""AWS' refusals of a publisher's calls, in words that say what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    CredentialRetrievalError,
    NoCredentialsError,
    PartialCredentialsError,
    ProfileNotFound,
)

from infranetes_common.errors import (
    InfranetesError,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
)

AGAIN = "run the command again: it goes on where it was stopped"
_DENIED = {"UnauthorizedOperation", "AccessDenied", "AccessDeniedException"}
_UNKNOWN_WHO = {
    "AuthFailure",
    "ExpiredToken",
    "ExpiredTokenException",
    "InvalidClientTokenId",
    "InvalidSignatureException",
    "SignatureDoesNotMatch",
    "UnrecognizedClientException",
}
_FULL = {"ServiceQuotaExceededException", "ConcurrentLimitExceededException", "SnapshotLimitExceeded"}
_MAX_MESSAGE = 400


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Translate botocore's errors into words that explain them. :raise InfranetesError: one of botocore's."""
    try:
        yield
    except ClientError as error:
        raise _meaning(what, error) from error
    except NoCredentialsError:
        raise Unauthenticated(
            f"can't {what}: there are no credentials; set access_key and secret_key in the configuration, or "
            f"AWS_PROFILE, or what else botocore knows"
        ) from None
    except (ProfileNotFound, PartialCredentialsError, CredentialRetrievalError) as error:
        words = " ".join(str(error).split())[:_MAX_MESSAGE]
        raise Unauthenticated(f"can't {what}: {words}; look at the credentials") from error
    except BotoCoreError as error:
        raise Unavailable(f"can't {what}: {' '.join(str(error).split())[:_MAX_MESSAGE]}; {AGAIN}") from error


def is_code(error: Exception, *codes: str) -> bool:
    """Return whether AWS gives one of these codes."""
    return _parts(error)[0] in codes


def _parts(error: Exception) -> tuple[str, str, str]:
    """Return the code and message of an error, and the action that it is about."""
    answer = getattr(error, "response", {})
    found = answer.get("Error", {}) if isinstance(answer, dict) else {}
    message = " ".join(str(found.get("Message", "")).split())[:_MAX_MESSAGE]
    return str(found.get("Code", "")), message, str(getattr(error, "operation_name", ""))


def _meaning(what: str, error: Exception) -> InfranetesError:
    code, message, action = _parts(error)
    words = f"can't {what}: {action}: {code}: {message}"
    if code in _DENIED:
        return PermissionDenied(
            f"{words}; allow it to the publishing account, as docs/publish-aws-policy.json does"
        )
    if code in _UNKNOWN_WHO:
        return Unauthenticated(f"{words}; look at the credentials")
    if code in _FULL:
        return ResourceExhausted(f"{words}; have AWS raise the quota, or {AGAIN} later")
    return InfranetesError(f"{words}; {AGAIN}")
