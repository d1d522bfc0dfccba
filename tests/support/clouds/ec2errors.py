"""What EC2 answers when it does not do what it is asked."""

from __future__ import annotations

from typing import Any

from tests.support.clouds.faults import Fault, Kind


def refusal(fault: Fault) -> Any:
    """The answer of a cloud that did nothing."""
    if fault.kind is Kind.THROTTLE:
        body = error("RequestLimitExceeded", "Request limit exceeded.")
        header = [("Retry-After", f"{fault.retry_after:g}")] if fault.retry_after else []
        return (503, body, *header)
    return {
        Kind.ERROR: (503, error("Unavailable", "The server is overloaded")),
        Kind.QUOTA: (400, error("VcpuLimitExceeded", "You have requested more vCPU capacity")),
        Kind.CAPACITY: (500, error("InsufficientInstanceCapacity", "There is no capacity")),
        Kind.UNKNOWN: (400, error("InvalidInstanceID.NotFound", "The instance does not exist")),
        Kind.REVOKED: (401, error("AuthFailure", "AWS was not able to validate the credentials")),
    }.get(fault.kind)


def error(code: str, words: str) -> bytes:
    """EC2's words for a call that it refuses."""
    return (
        f'<?xml version="1.0" encoding="UTF-8"?>\n<Response><Errors><Error><Code>{code}</Code>'
        f"<Message>{words}</Message></Error></Errors><RequestID>r</RequestID></Response>"
    ).encode()
