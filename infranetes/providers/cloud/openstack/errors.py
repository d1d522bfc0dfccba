# SPDX-License-Identifier: Apache-2.0
"""OpenStack's errors: the statuses of refused requests, and the faults of servers that did not come up.

Sources: Compute API, "Faults" and the responses of "Create Server"; Networking API, "General information";
the messages of Cinder's and Nova's exceptions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from libcloud.common.exceptions import BaseHTTPError

from infranetes.providers.cloud.calls.errors import message_of, retry_after
from infranetes.providers.cloud.interface import CloudError, ErrorKind

# Nova and Cinder refuse over quota with 403 or 413, Neutron with 409; these statuses have other meanings too.
_QUOTA = re.compile(
    r"quota|(?:limit|number of \w+(?: allowed \(\d+\))?) (?:is )?exceeded|OverQuota|"
    r"maximum allowed (?:limit|number)",
    re.IGNORECASE,
)
# Messages of Neutron and Nova: the network, which all zones share, has no address left.
_FULL = re.compile(
    r"No more (?:IP|fixed|floating) ?(?:IP )?addresses|No fixed IP addresses available|"
    r"IpAddressGenerationFailure",
    re.IGNORECASE,
)
# Faults of a server that no host accepted.
_NO_HOST = re.compile(
    r"No valid host|Exceeded maximum number of retries|Exhausted all hosts|Insufficient compute resources",
    re.IGNORECASE,
)
# Cinder's and Nova's refusals (400) because of what a volume, snapshot or server does at the moment, or
# because an earlier request has enlarged the volume since it was looked at.
_OTHER_STATE = re.compile(
    r"\bstatus\b|\bstate\b|already attached|must not be|greater than current size", re.IGNORECASE
)

MICROVERSION = "2.67"  # of the Compute API, since OpenStack Stein: adds volumes' types to tags at launch
VOLUME_MICROVERSION = "3.59"  # of the Block Storage API, since OpenStack Stein: enlarges volumes in use
_OLD_API = (
    f"this OpenStack is older than Stein: its Nova does not know version {MICROVERSION} of the Compute API, "
    f"or its Cinder version {VOLUME_MICROVERSION} of the Block Storage API"
)


def classify(error: Exception) -> CloudError | None:
    """Return what an error of OpenStack means; None: it is none of OpenStack's own."""
    if not isinstance(error, BaseHTTPError):
        return None
    status, message = int(error.code), message_of(error)
    if status == 406:
        return CloudError(ErrorKind.INVALID, _OLD_API)
    kind = _kind(status, message)
    return None if kind is None else CloudError(kind, message, retry_after(error))


def _kind(status: int, message: str) -> ErrorKind | None:
    """Return the kind of a refusal; None: the status alone decides, as for any other cloud."""
    if status in (400, 403, 409, 413) and _FULL.search(message):
        return ErrorKind.QUOTA
    if status in (403, 409, 413) and _QUOTA.search(message):
        return ErrorKind.QUOTA
    if status == 413:
        return ErrorKind.THROTTLED  # from proxies and old releases, with Retry-After
    return ErrorKind.STATE if status == 409 else None


@contextmanager
def disk_refusals() -> Iterator[None]:
    """Raise errors as what they mean for volumes and snapshots.

    :raise CloudError: `ErrorKind.STATE`: refused because of a state, which OpenStack reports with the status
        of requests that can never succeed."""
    try:
        yield
    except BaseHTTPError as error:
        words = message_of(error)
        if int(error.code) != 400 or not _OTHER_STATE.search(words):
            raise
        raise CloudError(ErrorKind.STATE, words) from error


def of_fault(message: str) -> ErrorKind | None:
    """Return the kind of a server's fault that another launch may avoid; None: no launch can."""
    if _FULL.search(message) or _QUOTA.search(message):
        return ErrorKind.QUOTA
    return ErrorKind.CAPACITY if _NO_HOST.search(message) else None
