# SPDX-License-Identifier: Apache-2.0
"""OpenStack's errors: the statuses of refused requests, and the faults of servers that did not come up.

Sources: Compute API, "Faults" and the responses of "Create Server"; Networking API, "General information".
"""

from __future__ import annotations

import re

from libcloud.common.exceptions import BaseHTTPError

from infranetes.providers.cloud.calls.errors import message_of, retry_after
from infranetes.providers.cloud.interface import CloudError, ErrorKind

# Nova and Cinder refuse over quota with 403 or 413, Neutron with 409; these statuses have other meanings too.
_QUOTA = re.compile(r"quota|(?:limit|number of \w+) (?:is )?exceeded|OverQuota", re.IGNORECASE)
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
_OLD_API = "this OpenStack is older than Stein: its Nova does not know version {version} of the Compute API"

MICROVERSION = "2.67"  # of the Compute API, since OpenStack Stein: adds volumes' types to tags at launch


def classify(error: Exception) -> CloudError | None:
    """Return what an error of OpenStack means; None: it is none of OpenStack's own."""
    if not isinstance(error, BaseHTTPError):
        return None
    status, message = int(error.code), message_of(error)
    if status == 406:
        return CloudError(ErrorKind.INVALID, _OLD_API.format(version=MICROVERSION))
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


def of_fault(message: str) -> ErrorKind | None:
    """Return the kind of a server's fault that another launch may avoid; None: no launch can."""
    if _FULL.search(message) or _QUOTA.search(message):
        return ErrorKind.QUOTA
    return ErrorKind.CAPACITY if _NO_HOST.search(message) else None
