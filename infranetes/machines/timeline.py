# SPDX-License-Identifier: Apache-2.0
"""The timeline of one VM and its pod: the steps of its life, bounded in number and size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import attrs
from twisted.internet.defer import CancelledError

from infranetes.observer import LaunchStep
from infranetes.tracing import spans
from infranetes_common.redaction import redacted_beginning

MAX_STEPS = 96
MAX_BYTES = 32 * 1024  # of all steps' texts
FIRST_STEPS = 32  # the launch's steps, which are kept even if a container that keeps ending adds many others
MAX_WORDS = 600  # characters of one text
_MAX_READ = 4 * MAX_WORDS  # characters of a text that are looked at


def bounded(text: str) -> str:
    """Return a text, possibly an agent's, as one printable line without secrets, at most MAX_WORDS characters
    long."""
    shown = " ".join(redacted_beginning(text, _MAX_READ).split())
    shown = "".join(character if character.isprintable() else "?" for character in shown)
    if shown == text:
        return text  # so that the steps of all pods share the texts that they have in common
    return shown if len(shown) <= MAX_WORDS else f"{shown[: MAX_WORDS - 1]}…"


@attrs.define
class Step:
    """One step. Times are nanoseconds since 1970 UTC.

    :ivar until: the end; 0: the step is under way; equal to `at`: it took no time.
    :ivar container: the name of the container that it concerns; "": the pod itself.
    :ivar detail: details, as a message. :ivar error: why it failed.
    :ivar launch: the step of a launch that it is; None: it belongs to no launch, or is a part of such a step.
    """

    what: str
    at: int
    until: int = 0
    container: str = ""
    detail: str = ""
    error: str = ""
    launch: LaunchStep | None = None

    def say(self, detail: str) -> None:
        """Set the step's detail."""
        self.detail = bounded(detail)

    @property
    def size(self) -> int:
        """The size of its texts in bytes."""
        return sum(len(text.encode()) for text in (self.what, self.container, self.detail, self.error))


class Timeline:
    """The steps in the order in which they began: the first FIRST_STEPS, and the latest of the others.

    :param now: returns the time in nanoseconds since 1970 UTC.
    :ivar steps: the steps that are kept. :ivar left_out: how many were dropped.
    """

    def __init__(self, now: Callable[[], int]) -> None:
        self._now = now
        self.steps: list[Step] = []
        self.left_out = 0

    def note(self, what: str, detail: str = "", *, container: str = "", error: str = "") -> None:
        """Add a step that takes no time."""
        step = self._begin(what, detail, container)
        step.until, step.error = step.at, bounded(error)
        self._make_room()

    @contextmanager
    def step(
        self, what: str, detail: str = "", *, container: str = "", launch: LaunchStep | None = None
    ) -> Iterator[Step]:
        """Add a step that lasts until the end of the block; an exception there becomes its error.

        In a traced call it is a span, too.

        :param launch: the step of a launch that it is."""
        step = self._begin(what, detail, container)
        step.launch = launch
        try:
            with spans.step(what):
                yield step
        except CancelledError:
            step.error = "given up"
            raise
        except BaseException as error:
            step.error = bounded(str(error) or type(error).__name__)
            raise
        finally:
            step.until = self._now()
            self._make_room()

    def launch_steps(self, since: int) -> tuple[tuple[LaunchStep, float], ...]:
        """Return the steps of a launch, each with its duration in seconds.

        :param since: the launch's beginning, nanoseconds since 1970 UTC."""
        return tuple(
            (step.launch, ((step.until or self._now()) - step.at) / 1e9)
            for step in self.steps
            if step.launch is not None and step.at >= since
        )

    def take(self, other: Timeline) -> None:
        """Add the steps of another timeline, in the order of time."""
        self.steps = sorted([*self.steps, *other.steps], key=lambda step: step.at)
        self.left_out += other.left_out
        self._make_room()

    def _begin(self, what: str, detail: str, container: str) -> Step:
        step = Step(bounded(what), self._now(), container=bounded(container), detail=bounded(detail))
        self.steps.append(step)
        self._make_room()
        return step

    def _make_room(self) -> None:
        """Drop the oldest steps after the first FIRST_STEPS, but never the newest step."""
        size = sum(step.size for step in self.steps)
        while len(self.steps) > MAX_STEPS or (size > MAX_BYTES and len(self.steps) > 1):
            oldest = FIRST_STEPS if len(self.steps) > FIRST_STEPS + 1 else 0
            size -= self.steps.pop(oldest).size
            self.left_out += 1
