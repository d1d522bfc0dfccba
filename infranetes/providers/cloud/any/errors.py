# SPDX-License-Identifier: Apache-2.0
"""The meanings of errors of libcloud's drivers.

Some drivers raise errors of their own, or plain ones, with the HTTP status in an attribute or in the words.
"""

from __future__ import annotations

import re

from libcloud.common.exceptions import BaseHTTPError, RateLimitReachedError
from libcloud.common.types import InvalidCredsError

from infranetes.providers.cloud.calls.errors import kind_of_status, message_of, retry_after
from infranetes.providers.cloud.interface import CloudError, ErrorKind

_STATUS = re.compile(r"\b(?:status|code)\b\D{0,8}([1-5][0-9]{2})\b", re.IGNORECASE)
_QUOTA = re.compile(
    r"quota|(?:limit|maximum|number of \w+)\b.{0,40}(?:exceed|reach)|(?:exceed|reach).{0,60}\blimit",
    re.IGNORECASE,
)
_CAPACITY = re.compile(
    r"no open slots|(?:out of|insufficient|no|lacks?) (?:stock|capacity|servers?|resources)|sold out"
    r"|(?:plan|size|type|region|location|host)\b.{0,60}(?:not|un)(?: currently)? ?available",
    re.IGNORECASE,
)


def classify(error: Exception) -> CloudError | None:
    """Return what an error of a driver means; None: the same as for every cloud."""
    if isinstance(error, InvalidCredsError | RateLimitReachedError):
        return None
    status, message = _status(error), message_of(error)
    if status is None:
        return None
    kind = kind_of_status(status)
    refused = 400 <= status < 500 and kind is not ErrorKind.THROTTLED
    if refused or 530 <= status < 540:  # the last are CloudStack's own
        if _QUOTA.search(message):
            kind = ErrorKind.QUOTA
        elif _CAPACITY.search(message):
            kind = ErrorKind.CAPACITY
    return CloudError(kind, message, retry_after(error))


def _status(error: Exception) -> int | None:
    """Return the HTTP status that an error tells of."""
    for name in ("code", "http_code"):
        value = getattr(error, name, None)
        if isinstance(value, int) and 100 <= value < 600:
            return value
    if isinstance(error, BaseHTTPError | OSError):
        return None
    found = _STATUS.search(str(error))
    return int(found[1]) if found else None
