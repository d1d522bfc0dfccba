# SPDX-License-Identifier: Apache-2.0
"""Every error that Infranetes raises on purpose, and its gRPC status.

A message says what happened, to what, and what to do about it. It is shown to people as it is, so it never
holds a secret. The status belongs to the class; there is no other mapping.
"""

from __future__ import annotations

from typing import ClassVar

from infranetes_common.redaction import redacted
from txgrpc import Code, GrpcError


class InfranetesError(Exception):
    """The base of all errors that Infranetes raises on purpose."""

    code: ClassVar[Code] = Code.INTERNAL


class InvalidArgument(InfranetesError):
    """The request can never succeed as it is worded."""

    code = Code.INVALID_ARGUMENT


class NotFound(InfranetesError):
    """Nothing has this id or name."""

    code = Code.NOT_FOUND


class AlreadyExists(InfranetesError):
    """The name is taken by something else."""

    code = Code.ALREADY_EXISTS


class FailedPrecondition(InfranetesError):
    """The request is valid but something else has to happen first."""

    code = Code.FAILED_PRECONDITION


class OutOfRange(InfranetesError):
    """The request begins after the end of the existing data; begin earlier."""

    code = Code.OUT_OF_RANGE


class DataLoss(InfranetesError):
    """Stored data is no longer what was written, and has to be transferred again."""

    code = Code.DATA_LOSS


class PermissionDenied(InfranetesError):
    """The other side is known and may not do this."""

    code = Code.PERMISSION_DENIED


class Unauthenticated(InfranetesError):
    """The other side did not prove who it is."""

    code = Code.UNAUTHENTICATED


class ResourceExhausted(InfranetesError):
    """A disk, a subnet, a quota or a bound is full."""

    code = Code.RESOURCE_EXHAUSTED


class Unavailable(InfranetesError):
    """A passing fault: the same call may succeed later."""

    code = Code.UNAVAILABLE


class DeadlineExceeded(InfranetesError):
    """The work took longer than its deadline."""

    code = Code.DEADLINE_EXCEEDED


class Unimplemented(InfranetesError):
    """Infranetes does not offer this."""

    code = Code.UNIMPLEMENTED


class NotOffered(FailedPrecondition):
    """A VM's agent does not offer a call: its guest image is of another release, or it shares its machine."""


class ConfigError(InfranetesError):
    """The configuration is wrong; the message names the file and the key."""

    code = Code.INVALID_ARGUMENT


_BY_CODE: dict[Code, type[InfranetesError]] = {
    kind.code: kind
    for kind in (
        InvalidArgument,
        NotFound,
        AlreadyExists,
        FailedPrecondition,
        OutOfRange,
        DataLoss,
        PermissionDenied,
        Unauthenticated,
        ResourceExhausted,
        Unavailable,
        DeadlineExceeded,
        Unimplemented,
    )
}


def code_of(error: BaseException) -> Code:
    """Return the code of the status with which an error leaves this process."""
    return error.code if isinstance(error, GrpcError | InfranetesError) else Code.INTERNAL


def to_grpc(error: BaseException) -> GrpcError:
    """Return the status with which an error leaves this process.

    It has no secrets: kubelet logs the text, and shows it in events of pods."""
    if isinstance(error, GrpcError):
        message = redacted(error.message)
        return error if message == error.message else GrpcError(error.code, message, error.metadata)
    if isinstance(error, InfranetesError):
        return GrpcError(error.code, redacted(str(error)))
    return GrpcError(Code.INTERNAL, f"unexpected {type(error).__name__}; the daemon's log has the details")


def from_grpc(error: GrpcError) -> InfranetesError:
    """Return the error for a status from the other side."""
    return _BY_CODE.get(error.code, InfranetesError)(error.message)
