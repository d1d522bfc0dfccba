# SPDX-License-Identifier: Apache-2.0
"""Compute Engine's errors: the reasons of refused requests and the codes of failed operations.

Sources: Compute Engine, "Troubleshooting API requests" and "Troubleshooting resource availability errors";
Google APIs, "Standard error responses".
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from libcloud.common.google import GoogleBaseError

from infranetes.providers.cloud.calls.errors import retry_after
from infranetes.providers.cloud.interface import CloudError, ErrorKind

_CODES = {
    ErrorKind.THROTTLED: (
        "rateLimitExceeded userRateLimitExceeded RATE_LIMIT_EXCEEDED concurrentLimitExceeded "
        "CONCURRENT_OPERATIONS_QUOTA_EXCEEDED RESOURCE_OPERATION_RATE_EXCEEDED servingLimitExceeded"
    ),
    ErrorKind.TRANSIENT: (
        "backendError internalError INTERNAL_ERROR serviceUnavailable SERVICE_UNAVAILABLE "
        "resourceNotReady RESOURCE_NOT_READY"
    ),
    ErrorKind.CAPACITY: (
        "ZONE_RESOURCE_POOL_EXHAUSTED ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS STOCKOUT "
        "RESOURCE_POOL_EXHAUSTED"
    ),
    # IP_SPACE_EXHAUSTED and the last one: the subnetwork, which all zones share, is full.
    ErrorKind.QUOTA: (
        "quotaExceeded QUOTA_EXCEEDED limitExceeded LIMIT_EXCEEDED dailyLimitExceeded IP_SPACE_EXHAUSTED "
        "IP_SPACE_EXHAUSTED_WITH_DETAILS"
    ),
    ErrorKind.CREDENTIALS: (
        "authError forbidden insufficientPermissions required accessNotConfigured PERMISSIONS_ERROR "
        "SERVICE_ACCOUNT_ACCESS_DENIED SERVICE_DISABLED"
    ),
    ErrorKind.CONFLICT: "alreadyExists RESOURCE_ALREADY_EXISTS",
    ErrorKind.NOT_FOUND: "notFound",
    ErrorKind.INVALID: (
        "invalid INVALID_FIELD_VALUE INVALID_USAGE UNSUPPORTED_OPERATION RESOURCE_NOT_FOUND "
        "EXTERNAL_RESOURCE_NOT_FOUND RESOURCE_IN_USE_BY_ANOTHER_RESOURCE IP_IN_USE_BY_ANOTHER_RESOURCE"
    ),
}
_KINDS = {code: kind for kind, codes in _CODES.items() for code in codes.split()}
_MAX_MESSAGE = 400

_OTHER_STATE = (
    "resourceInUseByAnotherResource",
    "RESOURCE_IN_USE_BY_ANOTHER_RESOURCE",
    "resourceNotReady",
    "RESOURCE_NOT_READY",
)
# "Cloud KMS error when using key projects/…: Permission 'cloudkms.cryptoKeyVersions.useToEncrypt' denied", or
# that the key is disabled: in the answer to the request, or as the error of an operation.
_KEY_REFUSED = "Cloud KMS error when using key"
# "Quota exceeded for quota metric 'Queries' and limit 'Queries per minute per region' …". The quota is
# renewed with the next minute; the answer does not say when that begins.
_PER_MINUTE, _MINUTE_PAUSE = "per minute", 10.0
_NO_DEVICE = "No attached disk found"
_GROWN = "must be larger than existing size"  # by an earlier request, since its size was looked at
# "Quota 'N2_CPUS' exceeded.  Limit: 24.0 in region europe-west1." Other quotas count all families, such as
# CPUS_ALL_REGIONS, PREEMPTIBLE_CPUS and INSTANCES.
_FAMILY_METRIC = re.compile(
    r"Quota '("
    r"CPUS|[A-Z]+[0-9]+[A-Z]*_CPUS|CPUS_PER_VM_FAMILY|(PREEMPTIBLE_)?NVIDIA_[A-Z0-9_]+_GPUS"
    r")' exceeded"
)
# Google's refusal of a disk for an instance that has as many as it can: "Maximum hyperdisk-balanced disks
# count should be less than or equal to [16]". Its code is that of unsupported requests.
_FULL = re.compile(r"Maximum \S+ disks count")


def classify(error: Exception) -> CloudError | None:
    """Return what an error of Google means; None: it is none of Google's."""
    if not isinstance(error, GoogleBaseError):
        return None
    code, status = str(error.code or ""), int(error.http_code or 0)
    kind = _KINDS.get(code) if (code, status) != ("required", 400) else ErrorKind.INVALID
    message = _message(error.value, code, status)
    if _KEY_REFUSED in message:
        kind = ErrorKind.INVALID
    if kind is ErrorKind.QUOTA and _FAMILY_METRIC.search(message):
        kind = ErrorKind.FAMILY_QUOTA
    pause = retry_after(error)
    if kind is ErrorKind.THROTTLED and _PER_MINUTE in message:
        pause = max(pause, _MINUTE_PAUSE)
    return CloudError(kind or _kind_of_status(status), message, pause)


@contextmanager
def disk_refusals() -> Iterator[None]:
    """Raise Google's errors as what they mean for disks.

    :raise CloudError: an error that means something else for disks. An operation that failed has to be
        requested again, whatever the reason: asking how it ended never has another answer."""
    try:
        yield
    except GoogleBaseError as error:
        found = classify(error)
        if found is None:
            raise
        words, code = str(found), str(error.code or "")
        passes = found.kind in (ErrorKind.TRANSIENT, ErrorKind.THROTTLED)
        # A failed operation is returned, with its error.
        has_failed = int(error.http_code or 0) == 200 and code and passes
        if code in _OTHER_STATE or _NO_DEVICE in words or _GROWN in words or has_failed:
            raise CloudError(ErrorKind.STATE, words) from error
        if _FULL.search(words):
            raise CloudError(ErrorKind.QUOTA, words) from error
        raise


def _kind_of_status(status: int) -> ErrorKind:
    # 200: the answer is not JSON, or an operation failed with an unknown code.
    if status >= 500 or status in (200, 408):
        return ErrorKind.TRANSIENT
    if status == 429:
        return ErrorKind.THROTTLED
    if status in (401, 403):
        return ErrorKind.CREDENTIALS
    return {404: ErrorKind.NOT_FOUND, 409: ErrorKind.CONFLICT}.get(status, ErrorKind.INVALID)


def _message(value: object, code: str, status: int) -> str:
    given = value.get("message") if isinstance(value, dict) else value
    message = " ".join(str(given or "").split())
    if "<" in message[:20]:
        message = ""  # an HTML page
    return f"{code or status}: {message or 'no message'}"[:_MAX_MESSAGE]
