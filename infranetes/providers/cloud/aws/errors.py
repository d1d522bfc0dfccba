# SPDX-License-Identifier: Apache-2.0
"""EC2's error codes (source: the EC2 API reference, "Error codes for the Amazon EC2 API")."""

from __future__ import annotations

import re

from libcloud.common.exceptions import BaseHTTPError
from libcloud.common.types import InvalidCredsError
from libcloud.compute.drivers.ec2 import IdempotentParamError

from infranetes.providers.cloud.calls.errors import message_of, retry_after
from infranetes.providers.cloud.interface import CloudError, ErrorKind

_CODES = {
    ErrorKind.THROTTLED: (
        "RequestLimitExceeded Throttling ThrottlingException RequestThrottled EC2ThrottledException "
        "TooManyRequestsException SlowDown BandwidthLimitExceeded SnapshotCreationPerVolumeRateExceeded"
    ),
    ErrorKind.TRANSIENT: "InternalError InternalFailure Unavailable ServiceUnavailable RequestTimeout",
    ErrorKind.CAPACITY: (
        "InsufficientInstanceCapacity InsufficientHostCapacity InsufficientReservedInstanceCapacity "
        "InsufficientCapacity Unsupported SpotMaxPriceTooLow InsufficientAddressCapacity "
        "InsufficientVolumeCapacity"
    ),
    ErrorKind.FULL_ZONE: "InsufficientFreeAddressesInSubnet",
    ErrorKind.QUOTA: (
        "InstanceLimitExceeded AddressLimitExceeded VolumeLimitExceeded ResourceCountExceeded "
        "MaxIOPSLimitExceeded AttachmentLimitExceeded VolumeModificationSizeLimitExceeded "
        "SnapshotLimitExceeded PendingSnapshotLimitExceeded ConcurrentSnapshotLimitExceeded"
    ),
    ErrorKind.FAMILY_QUOTA: "VcpuLimitExceeded MaxSpotInstanceCountExceeded",
    ErrorKind.CREDENTIALS: (
        "AuthFailure InvalidClientTokenId SignatureDoesNotMatch OptInRequired ExpiredToken RequestExpired "
        "UnauthorizedOperation AccessDenied Blocked PendingVerification UnrecognizedClientException "
        "MissingAuthenticationToken"
    ),
    ErrorKind.CONFLICT: "IdempotentParameterMismatch IdempotentInstanceTerminated",
    # VolumeModificationRateExceeded: a volume can be modified at most once in six hours.
    ErrorKind.STATE: (
        "IncorrectState IncorrectInstanceState VolumeInUse InvalidAttachment.NotFound "
        "InvalidSnapshot.InUse IncorrectModificationState VolumeModificationRateExceeded"
    ),
    ErrorKind.NOT_FOUND: (
        "InvalidInstanceID.NotFound InvalidInstanceID.Malformed InvalidAllocationID.NotFound "
        "InvalidAssociationID.NotFound InvalidVolume.NotFound InvalidAddress.NotFound "
        "InvalidVolumeID.Malformed InvalidSnapshot.NotFound"
    ),
}
_KINDS = {code: kind for kind, codes in _CODES.items() for code in codes.split()}
_MESSAGE = re.compile(r"([A-Za-z]+(?:\.[A-Za-z]+)*): ")


def classify(error: Exception) -> CloudError | None:
    """Return what an error code of EC2 means; None: it has none that is known."""
    if isinstance(error, IdempotentParamError):
        return CloudError(ErrorKind.CONFLICT, message_of(error))
    if isinstance(error, InvalidCredsError):
        return CloudError(ErrorKind.CREDENTIALS, message_of(error))
    if not isinstance(error, BaseHTTPError):
        return None
    match = _MESSAGE.match(str(error))
    if match is None:
        return None
    kind = _KINDS.get(match[1].removeprefix("Client.").removeprefix("Server."))
    return CloudError(kind, message_of(error), retry_after(error)) if kind is not None else None
