# SPDX-License-Identifier: Apache-2.0
"""Azure's errors: of refused requests, and of failed operations.

Sources: Azure Resource Manager, "Troubleshoot common Azure deployment errors"; Virtual Machines,
"Troubleshoot allocation failures", "Troubleshooting API throttling errors"; Azure REST API, "Common error
codes".
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from libcloud.common.exceptions import BaseHTTPError

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
