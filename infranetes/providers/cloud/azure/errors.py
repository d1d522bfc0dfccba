# SPDX-License-Identifier: Apache-2.0
"""Azure's errors: of refused requests, and of failed operations.

Sources: Azure Resource Manager, "Troubleshoot common Azure deployment errors"; Virtual Machines,
"Troubleshoot allocation failures", "Troubleshooting API throttling errors"; Azure REST API, "Common error
codes".
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from libcloud.common.exceptions import BaseHTTPError

from infranetes.providers.cloud.azure.resources import Operation
from infranetes.providers.cloud.calls.errors import classify as classify_status
from infranetes.providers.cloud.calls.errors import message_of, retry_after
from infranetes.providers.cloud.interface import CloudError, ErrorKind

_CODES = {
    ErrorKind.THROTTLED: (
        "TooManyRequests SubscriptionRequestsThrottled ResourceRequestsThrottled OperationThrottled "
        "ResourceCollectionRequestsThrottled RequestThrottled ReadThrottled"
    ),
    ErrorKind.TRANSIENT: (
        "InternalServerError InternalExecutionError InternalOperationError NetworkingInternalOperationError "
        "ServerTimeout GatewayTimeout ServiceUnavailable RetryableError Canceled CanceledAndSuperseded "
        "RetryableErrorDueToAnotherOperation AnotherOperationInProgress ReferencedResourceNotProvisioned "
        "ConflictingConcurrentWriteNotAllowed OperationPreempted"
    ),
    ErrorKind.CAPACITY: (
        "AllocationFailed ZonalAllocationFailed SkuNotAvailable OverconstrainedAllocationRequest "
        "OverconstrainedZonalAllocationRequest LocationNotAvailableForResourceType"
    ),
    ErrorKind.QUOTA: (
        "QuotaExceeded ResourceQuotaExceeded SubnetIsFull PublicIPCountLimitReached "
        "NetworkInterfaceCountLimitReached"
    ),
    ErrorKind.CREDENTIALS: (
        "AuthorizationFailed LinkedAuthorizationFailed AuthenticationFailed InvalidAuthenticationToken "
        "InvalidAuthenticationTokenTenant ExpiredAuthenticationToken ReadOnlyDisabledSubscription"
    ),
    ErrorKind.CONFLICT: "PreconditionFailed",
    ErrorKind.STATE: (
        "NicInUse NicReservedForAnotherVm InUseNetworkInterfaceCannotBeDeleted "
        "PublicIPAddressCannotBeDeleted AttachDiskWhileBeingDetached"
    ),
    ErrorKind.NOT_FOUND: "ResourceNotFound NotFound ResourceGroupNotFound",
    ErrorKind.INVALID: (
        "InvalidParameter InvalidRequestContent InvalidRequestFormat InvalidResourceReference "
        "LinkedInvalidPropertyId PropertyChangeNotAllowed RequestDisallowedByPolicy ScopeLocked BadRequest "
        "GalleryImageNotFound ImageNotFound"
    ),
}
# "… it results in exceeding approved standardDSv5Family Cores quota." Other quotas count all families, such
# as Total Regional Cores and, for spot VMs, LowPriorityCores.
_FAMILY_QUOTA = re.compile(r"approved [\w ]+Family Cores quota", re.IGNORECASE)
# "The maximum number of data disks allowed to be attached to a VM of this size is 4."
_NO_PLACE = re.compile(r"maximum number of data disks", re.IGNORECASE)
_LUN_TAKEN = re.compile(r"disk at LUN \d+ already exists", re.IGNORECASE)
_CONFLICT = 409  # the status
_KINDS = {code: kind for kind, codes in _CODES.items() for code in codes.split()}


class AzureError(BaseHTTPError):  # type: ignore[misc]
    """An error with Azure's own code. :ivar error_code: such as `SkuNotAvailable`; "": it has none."""

    def __init__(
        self, status: int, error_code: str, message: str, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(status, f"{error_code}: {message}" if error_code else message, headers)
        self.error_code = error_code


def classify(error: Exception) -> CloudError | None:
    """Return an error of Azure's as a `CloudError`; None: it is none of Azure's."""
    if not isinstance(error, AzureError):
        return None
    kind = _KINDS.get(error.error_code)
    if error.error_code == "OperationNotAllowed":  # Azure's code for anything that can't be done now
        kind = ErrorKind.QUOTA if "quota" in str(error).lower() else ErrorKind.STATE
    if kind is ErrorKind.QUOTA and _FAMILY_QUOTA.search(str(error)):
        kind = ErrorKind.FAMILY_QUOTA
    if int(error.code) == 429:  # whatever its error code is
        kind = ErrorKind.THROTTLED
    if kind is None:
        return classify_status(error)
    return CloudError(kind, message_of(error), retry_after(error))


def of_disk(error: AzureError) -> CloudError:
    """Return an error as what it means for a volume or a snapshot.

    Azure has many codes, all with one status, for what another change or a state does not allow now."""
    meaning = classify(error)
    assert meaning is not None
    if _NO_PLACE.search(str(meaning)):
        return CloudError(ErrorKind.QUOTA, str(meaning))
    passes = int(error.code) == _CONFLICT and meaning.kind in (ErrorKind.INVALID, ErrorKind.TRANSIENT)
    if passes or _LUN_TAKEN.search(str(meaning)):
        return CloudError(ErrorKind.STATE, str(meaning))
    return meaning


@contextmanager
def disk_refusals() -> Iterator[None]:
    """Raise errors as what they mean for volumes and snapshots: see `of_disk`."""
    try:
        yield
    except AzureError as error:
        raise of_disk(error) from error


def check_end(operation: Operation) -> bool:
    """Return whether a disk's operation has succeeded; False: it goes on.

    :raise CloudError: it has failed. `ErrorKind.STATE`: it may succeed if it is asked for again."""
    status = operation.get("status", "")
    if status not in ("Failed", "Canceled"):
        return status == "Succeeded"
    said = operation.get("error") or {}
    words = said.get("message") or "Azure does not say why it failed"
    meaning = of_disk(AzureError(_CONFLICT, said.get("code") or status, words))
    # However often it is polled it stays throttled.
    raise CloudError(ErrorKind.STATE, str(meaning)) if meaning.kind is ErrorKind.THROTTLED else meaning
