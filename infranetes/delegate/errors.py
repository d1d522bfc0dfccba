# SPDX-License-Identifier: Apache-2.0
"""The errors of our own calls of the delegate. Those of calls that are passed on stay as they are."""

from __future__ import annotations

from infranetes_common.errors import InfranetesError, Unavailable, from_grpc
from txgrpc import Code, GrpcError


def as_error(who: str, error: GrpcError) -> InfranetesError:
    """Return the error for a status of the delegate's.

    :param who: is asked, as people call it.
    """
    if error.code in (Code.UNAVAILABLE, Code.CANCELLED):
        return Unavailable(f"{who} can't be asked now: {error.message}")
    return from_grpc(GrpcError(error.code, f"{who} says: {error.message}"))
