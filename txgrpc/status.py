# SPDX-License-Identifier: Apache-2.0
"""gRPC's status codes and the error that carries one (source: grpc/grpc doc/statuscodes.md)."""

from __future__ import annotations

import enum


class Code(enum.IntEnum):
    """The gRPC status code with which a call ended."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


class GrpcError(Exception):
    """A call ended with a status other than OK.

    :ivar code: the status. :ivar message: an explanation for people.
    :ivar metadata: the trailing metadata, pairs of name and value (bytes where the name ends in -bin).
    """

    def __init__(
        self, code: Code, message: str = "", metadata: tuple[tuple[str, str | bytes], ...] = ()
    ) -> None:
        super().__init__(code, message)
        self.code = code
        self.message = message
        self.metadata = metadata

    def __str__(self) -> str:
        return f"{self.code.name}: {self.message}"


class Disconnected(GrpcError):
    """The call got no connection, or lost it, so the peer never reported the call's outcome."""

    def __init__(self, message: str) -> None:
        super().__init__(Code.UNAVAILABLE, message)


#: Source: grpc/grpc doc/http-grpc-status-mapping.md; anything else is UNKNOWN.
_BY_HTTP_STATUS = {
    400: Code.INTERNAL,
    401: Code.UNAUTHENTICATED,
    403: Code.PERMISSION_DENIED,
    404: Code.UNIMPLEMENTED,
    429: Code.UNAVAILABLE,
    502: Code.UNAVAILABLE,
    503: Code.UNAVAILABLE,
    504: Code.UNAVAILABLE,
}

#: RST_STREAM's error codes, as grpc/grpc doc/PROTOCOL-HTTP2.md maps them; anything else is INTERNAL.
_BY_RESET = {
    0x7: Code.UNAVAILABLE,  # REFUSED_STREAM
    0x8: Code.CANCELLED,  # CANCEL
    0xB: Code.RESOURCE_EXHAUSTED,  # ENHANCE_YOUR_CALM
    0xC: Code.PERMISSION_DENIED,  # INADEQUATE_SECURITY
}


def code_for_http_status(status: int) -> Code:
    """Return the code for an HTTP response without a gRPC status."""
    return _BY_HTTP_STATUS.get(status, Code.UNKNOWN)


def code_for_reset(error_code: int) -> Code:
    """Return the code for a call whose stream the other side has reset."""
    return _BY_RESET.get(error_code, Code.INTERNAL)
