# SPDX-License-Identifier: Apache-2.0
"""What connections to all services of OpenStack share."""

from __future__ import annotations

import json
from typing import Any

_MAX_WORDS = 300


def words_of(body: str) -> str:
    """Return the message in the body of an error, as one line: each service has its own form."""
    try:
        found = json.loads(body)
        found = next(iter(found.values())) if isinstance(found, dict) and len(found) == 1 else found
        message = str(found["message"] if isinstance(found, dict) else found)
    except (ValueError, KeyError, StopIteration):
        message = ""  # an HTML page
    return " ".join(message.split())[:_MAX_WORDS]


class Trusting:
    """A mixin for libcloud's connections: trusts the CAs of a file. libcloud has one file for all clouds."""

    ca_file = ""
    connection: Any  # Any: libcloud's connection, made of requests

    def connect(self, *args: Any, **options: Any) -> None:  # Any: libcloud's base class takes them
        """Prepare a session; nothing is sent yet."""
        super().connect(*args, **options)  # type: ignore[misc]
        if self.ca_file:
            self.connection.ca_cert = self.ca_file
