# SPDX-License-Identifier: Apache-2.0
"""Azure's operations: what a request has begun, and answers tell the place of.

Source: Azure Resource Manager, "Track asynchronous Azure operations".
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from typing import Literal

import attrs

from tests.support.clouds import azure_resources as resources
from tests.support.clouds.azure_resources import LOCATION, SUBSCRIPTION, Json

Place = Literal["operations", "DiskOperations", "result"]
"""Where an operation is: among those of VMs, or of disks, or where its result will be."""


class Refusal(Exception):
    """An error that is answered."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message


@attrs.define
class Answer:
    """What is answered. :ivar operation: its name, if one has begun."""

    status: int
    body: Json = attrs.field(factory=dict)
    operation: str = ""
    place: Place = "operations"


class Operations:
    """All operations, by name. :ivar later: calls a function once an operation has taken its time."""

    def __init__(self) -> None:
        self.later: Callable[[Callable[[], None]], None] = lambda work: work()
        self.operations: dict[str, Json] = {}

    def begin(self) -> str:
        """Begin an operation; return its name."""
        name = secrets.token_hex(16)
        self.operations[name] = {"name": name, "startTime": resources.now(), "status": "InProgress"}
        return name

    def finish(self, operation: str, code: str = "", message: str = "") -> None:
        """End an operation; `code` is its error."""
        said = self.operations[operation]
        said.update(status="Failed" if code else "Succeeded", endTime=resources.now())
        if code:
            said["error"] = {"code": code, "message": message}

    def shown(self, name: str, query: Mapping[str, str]) -> Answer:
        """Answer a look at an operation, or at the place of its result."""
        if name not in self.operations:
            raise Refusal(404, "ResourceNotFound", f"The operation '{name}' was not found.")
        said = self.operations[name]
        if query.get("monitor") != "true":
            return Answer(200, said)
        if said["status"] == "Failed":
            raise Refusal(409, said["error"]["code"], said["error"]["message"])
        return Answer(202 if said["status"] == "InProgress" else 200)


def path_of(answer: Answer) -> str:
    """Return where an answer says that its operation is."""
    version = "2025-01-02" if answer.place == "DiskOperations" else "2025-04-01"
    kind, more = ("operations", "&monitor=true") if answer.place == "result" else (answer.place, "")
    here = f"/subscriptions/{SUBSCRIPTION}/providers/Microsoft.Compute/locations/{LOCATION}"
    return f"{here}/{kind}/{answer.operation}?api-version={version}{more}"
