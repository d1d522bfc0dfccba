# SPDX-License-Identifier: Apache-2.0
"""Compute Engine's operations: the work that a request has begun, and its end."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import attrs

from tests.support.clouds import gce_resources as resources
from tests.support.clouds.gce_resources import Json

Error = tuple[str, str]
"""The code and the message of a failed operation; ("", ""): it has succeeded."""


class Refusal(Exception):
    """An error that is answered."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status, self.reason, self.message = status, reason, message


def in_use(disk: Json, user: str) -> str:
    """The message about a disk that an instance has."""
    return f"The disk resource '{path_of(disk['selfLink'])}' is already being used by '{path_of(user)}'"  #


def path_of(link: str) -> str:
    """`projects/P/zones/…` of a link to a resource, or of such a path itself."""
    return "projects/" + link.partition("projects/")[2]


@attrs.define
class Task:
    """What an operation does, and how it ends."""

    zone: str
    answer: Json


class Operations:
    """All operations of a project.

    :ivar later: calls a function once an operation has taken its time.
    :ivar busy: links to the resources that running operations have to themselves.
    :ivar failing: the error with which the next operation of a kind fails, and then does nothing.
    """

    def __init__(self) -> None:
        self.tasks: dict[str, Task] = {}
        self.later: Callable[[Callable[[], None]], None] = lambda work: work()
        self.busy: set[str] = set()
        self.failing: dict[str, Error] = {}
        self._requests: dict[str, tuple[str, str]] = {}  # the request and its operation, by requestId

    def begin(self, zone: str, kind: str, target: Json) -> Task:
        """Begin an operation that `finish` ends."""
        task = Task(zone, resources.operation(zone, kind, target))
        self.tasks[task.answer["name"]] = task
        return task

    def finish(self, task: Task, code: str = "", message: str = "") -> None:
        """End an operation; `code` is its error."""
        task.answer.update(status="DONE", progress=100, endTime=resources.now())
        if code:
            task.answer["error"] = {"errors": [{"code": code, "message": message}]}

    def run(
        self,
        zone: str,
        kind: str,
        target: Json,
        work: Callable[[], Error | None],
        *,
        undo: Callable[[], None] = lambda: None,
        alone: bool = True,
    ) -> Json:
        """Answer with an operation that does `work`.

        :param undo: called in place of `work` if the operation fails. :param alone: whether it has `target`
            to itself meanwhile.
        :raise Refusal: another one has it."""
        link = target["selfLink"]
        if alone:
            self.check_ready(target)
            self.busy.add(link)
        task = self.begin(zone, kind, target)
        asked = dict(task.answer)

        def end() -> None:
            if alone:
                self.busy.discard(link)
            error = self.failing.pop(kind, None)
            if error is None:
                error = work()
            else:
                undo()
            self.finish(task, *(error or ("", "")))

        self.later(end)
        return asked

    def check_ready(self, target: Json) -> None:
        """Check that no operation has `target` to itself. :raise Refusal: one has."""
        if target["selfLink"] in self.busy:
            message = f"The resource '{path_of(target['selfLink'])}' is not ready"
            raise Refusal(400, "resourceNotReady", message)

    def once(self, request_id: str, asked: list[Any], answer: Callable[[], Json]) -> Json:
        """Answer a request; if it is repeated with its id, answer with the operation that it began before."""
        if not request_id:
            return answer()
        words = json.dumps(asked, sort_keys=True)
        known = self._requests.get(request_id)
        if known is None:
            found = answer()
            self._requests[request_id] = words, found["name"]
            return found
        if known[0] != words:
            message = f"Invalid value for field 'requestId': '{request_id}'. It was used for another request."
            raise Refusal(400, "invalid", message)
        return self.tasks[known[1]].answer
