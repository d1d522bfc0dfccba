# SPDX-License-Identifier: Apache-2.0
"""Clouds' errors as Infranetes' errors."""

from __future__ import annotations

from infranetes.providers.cloud.interface import CloudError, ErrorKind
from infranetes_common.errors import (
    FailedPrecondition,
    InfranetesError,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
)

_ERRORS: dict[ErrorKind, tuple[type[InfranetesError], str]] = {
    ErrorKind.THROTTLED: (Unavailable, "it is asked too often; try again later"),
    ErrorKind.TRANSIENT: (Unavailable, "try again later"),
    ErrorKind.CAPACITY: (ResourceExhausted, "allow more sizes or subnets, or try again later"),
    ErrorKind.FULL_ZONE: (ResourceExhausted, "add a subnet with free addresses, or remove what uses them up"),
    ErrorKind.QUOTA: (ResourceExhausted, "have the limit raised, or remove what uses it up"),
    ErrorKind.FAMILY_QUOTA: (
        ResourceExhausted,
        "have the limit raised, remove what uses it up, or allow sizes of other families",
    ),
    ErrorKind.CREDENTIALS: (FailedPrecondition, "give the node credentials that are valid and may do this"),
    ErrorKind.STATE: (Unavailable, "try again later"),
    ErrorKind.CONFLICT: (Unavailable, "its VM is not shown yet; try again later"),
    ErrorKind.NOT_FOUND: (NotFound, "it may have been removed by somebody else"),
    ErrorKind.INVALID: (InvalidArgument, "change the pod's annotations or the configuration"),
    ErrorKind.UNEXPECTED: (InfranetesError, "the daemon's log has the details"),
}


def to_infranetes_error(location: str, error: CloudError) -> InfranetesError:
    """Return the error with which a failed call leaves the provider."""
    kind, advice = _ERRORS[error.kind]
    return kind(f"{location}: {error}; {advice}")
