"""Compute Engine's errors: reasons of refusals, and codes that operations end with.

Sources: Compute Engine, "Troubleshooting API requests" and "Troubleshooting resource availability errors";
Google APIs, "Standard error responses".
"""

from __future__ import annotations

from typing import Any

from libcloud.common.google import GoogleBaseError

from infranetes.providers.cloud.interface import CloudError, Trouble
from infranetes.providers.cloud.judge import retry_after

_CODES = {
    Trouble.THROTTLED: (
        "rateLimitExceeded userRateLimitExceeded RATE_LIMIT_EXCEEDED concurrentLimitExceeded "
        "CONCURRENT_OPERATIONS_QUOTA_EXCEEDED RESOURCE_OPERATION_RATE_EXCEEDED servingLimitExceeded"
    ),
    Trouble.PASSING: (
        "backendError internalError INTERNAL_ERROR serviceUnavailable SERVICE_UNAVAILABLE "
        "resourceNotReady RESOURCE_NOT_READY"
    ),
    Trouble.CAPACITY: (
        "ZONE_RESOURCE_POOL_EXHAUSTED ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS STOCKOUT "
        "IP_SPACE_EXHAUSTED IP_SPACE_EXHAUSTED_WITH_DETAILS RESOURCE_POOL_EXHAUSTED"
    ),
    Trouble.QUOTA: "quotaExceeded QUOTA_EXCEEDED limitExceeded LIMIT_EXCEEDED dailyLimitExceeded",
    Trouble.CREDENTIALS: (
        "authError forbidden insufficientPermissions required accessNotConfigured PERMISSIONS_ERROR "
        "SERVICE_ACCOUNT_ACCESS_DENIED SERVICE_DISABLED"
    ),
    Trouble.CONFLICT: "alreadyExists RESOURCE_ALREADY_EXISTS",
    Trouble.MISSING: "notFound",
    Trouble.INVALID: (
        "invalid INVALID_FIELD_VALUE INVALID_USAGE UNSUPPORTED_OPERATION RESOURCE_NOT_FOUND "
        "EXTERNAL_RESOURCE_NOT_FOUND RESOURCE_IN_USE_BY_ANOTHER_RESOURCE IP_IN_USE_BY_ANOTHER_RESOURCE"
    ),
}
_TROUBLES = {code: trouble for trouble, codes in _CODES.items() for code in codes.split()}
_MAX_WORDS = 400


def judge(error: Exception) -> CloudError | None:
    """What Google means by an error; None: it is not Google's."""
    if not isinstance(error, GoogleBaseError):
        return None
    code, status = str(error.code or ""), int(error.http_code or 0)
    trouble = _TROUBLES.get(code) if (code, status) != ("required", 400) else Trouble.INVALID
    return CloudError(trouble or _of_status(status), _words(error, code, status), retry_after(error))


def _of_status(status: int) -> Trouble:
    if status >= 500 or status in (200, 408):  # 200: what is no JSON, or an operation's unknown end
        return Trouble.PASSING
    if status == 429:
        return Trouble.THROTTLED
    if status in (401, 403):
        return Trouble.CREDENTIALS
    return {404: Trouble.MISSING, 409: Trouble.CONFLICT}.get(status, Trouble.INVALID)


def _words(error: Any, code: str, status: int) -> str:
    value = error.value
    message = value.get("message") if isinstance(value, dict) else value
    words = " ".join(str(message or "").split())
    if "<" in words[:20]:
        words = ""  # a page for browsers
    return f"{code or status}: {words or 'no words'}"[:_MAX_WORDS]
