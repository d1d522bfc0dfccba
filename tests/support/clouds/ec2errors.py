# SPDX-License-Identifier: Apache-2.0
"""EC2's errors."""

from __future__ import annotations

from tests.support.clouds.faults import Fault, FaultKind
from tests.support.clouds.http_sites import Answer

# EC2 has no other limit of vCPUs than those of families.
_VCPUS = (
    "You have requested more vCPU capacity than your current vCPU limit of 8 allows for the instance bucket "
    "that the specified instance type belongs to."
)


def refusal(fault: Fault) -> Answer | None:
    """Return the answer to a call that had no effect; None: it has one."""
    if fault.kind is FaultKind.THROTTLE:
        body = error("RequestLimitExceeded", "Request limit exceeded.")
        header = [("Retry-After", f"{fault.retry_after:g}")] if fault.retry_after else []
        return (503, body, *header)
    return {
        FaultKind.ERROR: (503, error("Unavailable", "The server is overloaded")),
        FaultKind.QUOTA: (400, error("VcpuLimitExceeded", _VCPUS)),
        FaultKind.FAMILY_QUOTA: (400, error("VcpuLimitExceeded", _VCPUS)),
        FaultKind.CAPACITY: (500, error("InsufficientInstanceCapacity", "There is no capacity")),
        FaultKind.FULL_SUBNET: (
            400,
            error("InsufficientFreeAddressesInSubnet", "There are not enough free addresses in the subnet."),
        ),
        FaultKind.UNKNOWN: (400, error("InvalidInstanceID.NotFound", "The instance does not exist")),
        FaultKind.REVOKED: (401, error("AuthFailure", "AWS was not able to validate the credentials")),
    }.get(fault.kind)


def error(code: str, words: str) -> bytes:
    """Return EC2's XML of an error."""
    return (
        f'<?xml version="1.0" encoding="UTF-8"?>\n<Response><Errors><Error><Code>{code}</Code>'
        f"<Message>{words}</Message></Error></Errors><RequestID>r</RequestID></Response>"
    ).encode()
