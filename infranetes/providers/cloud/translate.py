"""A cloud's troubles as Infranetes' errors."""

from __future__ import annotations

from infranetes.providers.cloud.interface import CloudError, Trouble
from infranetes_common.errors import (
    FailedPrecondition,
    InfranetesError,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
)

_ERRORS: dict[Trouble, tuple[type[InfranetesError], str]] = {
    Trouble.THROTTLED: (Unavailable, "it is asked too often; try again later"),
    Trouble.PASSING: (Unavailable, "try again later"),
    Trouble.CAPACITY: (ResourceExhausted, "allow more sizes or subnets, or try again later"),
    Trouble.QUOTA: (ResourceExhausted, "have the limit raised, or remove pods"),
    Trouble.CREDENTIALS: (FailedPrecondition, "give the node credentials that are valid and may do this"),
    Trouble.CONFLICT: (Unavailable, "its VM is not shown yet; try again later"),
    Trouble.MISSING: (NotFound, "it may have been removed by somebody else"),
    Trouble.INVALID: (InvalidArgument, "change the pod's annotations or the configuration"),
    Trouble.BROKEN: (InfranetesError, "the daemon's log has the details"),
}


def failed(place: str, error: CloudError) -> InfranetesError:
    """The error that leaves the provider."""
    kind, advice = _ERRORS[error.trouble]
    return kind(f"{place}: {error}; {advice}")
