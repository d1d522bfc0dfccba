"""EC2's error codes (source: the EC2 API reference, "Error codes for the Amazon EC2 API")."""

from __future__ import annotations

import re

from libcloud.common.exceptions import BaseHTTPError
from libcloud.common.types import InvalidCredsError
from libcloud.compute.drivers.ec2 import IdempotentParamError

from infranetes.providers.cloud.interface import CloudError, Trouble
from infranetes.providers.cloud.judge import retry_after, said

_CODES = {
    Trouble.THROTTLED: (
        "RequestLimitExceeded Throttling ThrottlingException RequestThrottled EC2ThrottledException "
        "TooManyRequestsException SlowDown BandwidthLimitExceeded"
    ),
    Trouble.PASSING: "InternalError InternalFailure Unavailable ServiceUnavailable RequestTimeout",
    Trouble.CAPACITY: (
        "InsufficientInstanceCapacity InsufficientHostCapacity InsufficientReservedInstanceCapacity "
        "InsufficientCapacity InsufficientFreeAddressesInSubnet Unsupported SpotMaxPriceTooLow "
        "InsufficientAddressCapacity InsufficientVolumeCapacity"
    ),
    Trouble.QUOTA: (
        "InstanceLimitExceeded VcpuLimitExceeded AddressLimitExceeded VolumeLimitExceeded "
        "MaxSpotInstanceCountExceeded ResourceCountExceeded MaxIOPSLimitExceeded"
    ),
    Trouble.CREDENTIALS: (
        "AuthFailure InvalidClientTokenId SignatureDoesNotMatch OptInRequired ExpiredToken RequestExpired "
        "UnauthorizedOperation AccessDenied Blocked PendingVerification UnrecognizedClientException "
        "MissingAuthenticationToken"
    ),
    Trouble.CONFLICT: "IdempotentParameterMismatch IdempotentInstanceTerminated",
    Trouble.MISSING: (
        "InvalidInstanceID.NotFound InvalidInstanceID.Malformed InvalidAllocationID.NotFound "
        "InvalidAssociationID.NotFound InvalidVolume.NotFound InvalidAddress.NotFound"
    ),
}
_TROUBLES = {code: trouble for trouble, codes in _CODES.items() for code in codes.split()}
_MESSAGE = re.compile(r"([A-Za-z]+(?:\.[A-Za-z]+)*): ")


def judge(error: Exception) -> CloudError | None:
    """What EC2 means by an error; None: it did not say."""
    if isinstance(error, IdempotentParamError):
        return CloudError(Trouble.CONFLICT, said(error))
    if isinstance(error, InvalidCredsError):
        return CloudError(Trouble.CREDENTIALS, said(error))
    if not isinstance(error, BaseHTTPError):
        return None
    found = _MESSAGE.match(str(error))
    if found is None or found[1].removeprefix("Client.").removeprefix("Server.") not in _TROUBLES:
        return None
    trouble = _TROUBLES[found[1].removeprefix("Client.").removeprefix("Server.")]
    return CloudError(trouble, said(error), retry_after(error))
