# SPDX-License-Identifier: Apache-2.0
"""A line in the daemon's log for each event in a container's life, with its ids and names.

Events that no step of its pod's timeline shows, such as its end, are added there too."""

from __future__ import annotations

from collections.abc import Callable

from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from infranetes.pods.node.events import EventType
from infranetes.pods.node.inventory import Container, Inventory
from infranetes_common.nanoseconds import nanoseconds

MAX_PROGRAM = 64  # characters of a command's first word

_log = Logger()


def log_container_events(inventory: Inventory, clock: IReactorTime) -> None:
    """Log the events of the node's containers from now on.

    Those of sandboxes are logged where they happen."""
    inventory.events.listen(lambda event, sandbox, container: _log_event(clock, event, container))


def log_command(
    container: Container,
    command: list[str],
    outcome: str,
    seconds: float | None = None,
    *,
    routine: bool = False,
) -> None:
    """Log a command run in a container: only its first word, since arguments may be secrets.

    :param outcome: how the command ended, in words.
    :param routine: log at the debug level only: kubelet's probes run every few seconds."""
    _line(container, "command {program} in container {name} of {pod} " + outcome, seconds,
          _log.debug if routine else _log.info,
          program=command[0][:MAX_PROGRAM] if command else "")  # fmt: skip


def _log_event(clock: IReactorTime, event: EventType, container: Container | None) -> None:
    if container is None:
        return
    record, requested_at = container.record, container.requested_at
    _note_event(event, container)
    took = None if requested_at is None else clock.seconds() - requested_at
    if event is EventType.CREATED:
        _line(
            container, "container {name} of {pod} is created", (nanoseconds(clock) - record.created_at) / 1e9
        )
    elif event is EventType.STARTED:
        _line(container, "container {name} of {pod} runs", took)
    elif event is EventType.STOPPED and record.finished_at:
        ran = (record.finished_at - record.started_at) / 1e9 if record.started_at else None
        _line(container, "container {name} of {pod} ended: exit code {code}, {reason}", ran,
              code=record.exit_code, reason=record.reason)  # fmt: skip
    elif event is EventType.DELETED:
        _line(container, "container {name} of {pod} is removed", took)


def _note_event(event: EventType, container: Container) -> None:
    """Add the event to the timeline, unless a step there shows it already."""
    record, timeline, name = container.record, container.sandbox.timeline, container.config.metadata.name
    if event is EventType.STARTED and container.starting is None:
        timeline.note("the container runs, as its agent reports", container=name)
    elif event is EventType.STOPPED and record.finished_at:
        words = f"exit code {record.exit_code}, {record.reason}"
        timeline.note("the container has ended", words, container=name, error=record.message)
    elif event is EventType.DELETED:
        timeline.note("the container is removed", container=name)


def _line(
    container: Container,
    words: str,
    seconds: float | None,
    log: Callable[..., None] | None = None,
    **more: object,
) -> None:
    (log or _log.info)(
        words,
        name=container.config.metadata.name,
        pod=container.sandbox.pod,
        container=container.id,
        sandbox=container.record.sandbox_id,
        seconds=seconds,
        **more,
    )
