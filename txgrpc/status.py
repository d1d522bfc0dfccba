"""gRPC's status codes and the error that carries one (source: grpc/grpc doc/statuscodes.md)."""

from __future__ import annotations

import enum


class Code(enum.IntEnum):
    """How a call ended."""

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

    :ivar code: the status. :ivar message: what the other side said, for people.
    :ivar metadata: the trailing metadata, pairs of name and value (bytes where the name ends in -bin).
    """

    def __init__(self, code: Code, message: str = "", metadata: tuple[tuple[str, str | bytes], ...] = ()) -> None:
        super().__init__(code, message)
        self.code = code
        self.message = message
        self.metadata = metadata

    def __str__(self) -> str:
        return f"{self.code.name}: {self.message}"
