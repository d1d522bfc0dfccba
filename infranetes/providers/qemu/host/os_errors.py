# SPDX-License-Identifier: Apache-2.0
"""The operating system's errors as Infranetes' own, which say what to do."""

from __future__ import annotations

import errno

from infranetes_common.errors import FailedPrecondition, InfranetesError, ResourceExhausted, Unavailable

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


def as_infranetes_error(error: Exception) -> InfranetesError:
    """Translate an error; Infranetes' own are returned as they are."""
    if isinstance(error, InfranetesError):
        return error
    if isinstance(error, OSError):
        what = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        if error.errno in _DISK_FULL:
            return ResourceExhausted(f"the node's disk is full: {what}; make room")
        if isinstance(error, FileNotFoundError):
            return FailedPrecondition(f"a file of the provider is missing: {what}; restart Infranetes")
        return Unavailable(f"the node refuses: {what}")
    return InfranetesError(f"unexpected {type(error).__name__}: {error}")
