# SPDX-License-Identifier: Apache-2.0
"""The timeline of a VM and its pod: what has happened to them step by step, within bounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import attrs
from twisted.internet.defer import CancelledError

from infranetes.observer import LaunchStep
from infranetes.tracing import spans

MAX_STEPS = 96
MAX_BYTES = 32 * 1024  # of the texts of all steps
FIRST_STEPS = 32  # of the launch; they are kept, however many steps a crashing container adds
MAX_WORDS = 600  # characters of one text


def bounded(text: str) -> str:
    """Return a text, possibly from an agent, as one printable line of at most MAX_WORDS characters."""
    shown = " ".join(text[: 2 * MAX_WORDS].split())
    shown = "".join(each if each.isprintable() else "?" for each in shown)
    return shown if len(shown) <= MAX_WORDS else f"{shown[: MAX_WORDS - 1]}…"


@attrs.define
class Step:
    """One step. Times are nanoseconds since 1970 UTC.

    :ivar until: when it ended; 0: it is under way; the same as `at`: it took no time.
    :ivar container: the name of the container that it is about; "": the pod itself.
    :ivar detail: more about it. :ivar error: why it failed.
    :ivar launch: which step of a launch it is; None: it is none, or only a part of one.
    """

    what: str
    at: int
    until: int = 0
    container: str = ""
    detail: str = ""
    error: str = ""
    launch: LaunchStep | None = None

    def say(self, detail: str) -> None:
        """Set `detail`."""
        self.detail = bounded(detail)

    @property
    def size(self) -> int:
        """How many bytes its texts have."""
        return sum(len(each.encode()) for each in (self.what, self.container, self.detail, self.error))


class Timeline:
    """The steps in the order in which they began: the first FIRST_STEPS, and the last of the rest.

    :param now: gives nanoseconds since 1970 UTC.
    :ivar steps: the steps that are kept. :ivar left_out: how many are not.
    """

    def __init__(self, now: Callable[[], int]) -> None:
        self._now = now
        self.steps: list[Step] = []
        self.left_out = 0

    def note(self, what: str, detail: str = "", *, container: str = "", error: str = "") -> None:
        """Add a step that took no time."""
        step = self._begin(what, detail, container)
        step.until, step.error = step.at, bounded(error)
        self._make_room()

    @contextmanager
    def step(
        self, what: str, detail: str = "", *, container: str = "", launch: LaunchStep | None = None
    ) -> Iterator[Step]:
        """Add a step that is under way until the end of the block; an exception there is its error.

        It is a span too, if there is a current one.

        :param launch: which step of a launch it is."""
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
        """Return the steps of the launch that began then, each with its seconds.

        :param since: nanoseconds since 1970."""
        return tuple(
            (step.launch, ((step.until or self._now()) - step.at) / 1e9)
            for step in self.steps
            if step.launch is not None and step.at >= since
        )

    def take(self, other: Timeline) -> None:
        """Add the steps of another timeline, in the order of their times."""
        self.steps = sorted([*self.steps, *other.steps], key=lambda step: step.at)
        self.left_out += other.left_out
        self._make_room()

    def _begin(self, what: str, detail: str, container: str) -> Step:
        step = Step(bounded(what), self._now(), container=bounded(container), detail=bounded(detail))
        self.steps.append(step)
        self._make_room()
        return step

    def _make_room(self) -> None:
        """Drop the oldest steps behind the first ones, but never the newest step."""
        size = sum(step.size for step in self.steps)
        while len(self.steps) > MAX_STEPS or (size > MAX_BYTES and len(self.steps) > 1):
            oldest = FIRST_STEPS if len(self.steps) > FIRST_STEPS + 1 else 0
            size -= self.steps.pop(oldest).size
            self.left_out += 1
