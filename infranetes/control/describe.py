# SPDX-License-Identifier: Apache-2.0
"""The calls of ``proto/control.proto`` that tell what happened to pods, and what containers they have."""

from __future__ import annotations

import heapq
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from itertools import islice
from typing import TypeVar

from twisted.internet.interfaces import IReactorTime

from infranetes.control.service import past_pod, shown_pod
from infranetes.machines.timeline import Step, Timeline, bounded
from infranetes.pods.node.handlers import Handlers
from infranetes.pods.node.inventory import Container, Inventory, PastSandbox, Sandbox
from infranetes.pods.node.meant import find_sandbox
from infranetes.pods.node.node_providers import Providers
from infranetes.pods.vm.guest_view import GuestView, look, way_of
from infranetes_common.redaction import redacted
from infranetes_common.wire import control
from infranetes_common.wire.control_rpcs import ControlDescriptionRpcs
from txgrpc import Call

AT_ONCE = 200  # entries of one message: 250 pods have 24,000 steps
MAX_EVENTS = 10_000  # the newest of one answer

_T = TypeVar("_T")


class DescribeCalls(ControlDescriptionRpcs):
    """Answers with pods' timelines and containers, and with a pod's guest."""

    def __init__(
        self, clock: IReactorTime, inventory: Inventory, providers: Providers, handlers: Handlers
    ) -> None:
        self._clock = clock
        self._inventory = inventory
        self._providers = providers
        self._handlers = handlers

    async def DescribePod(
        self, request: control.DescribePodRequest, call: Call
    ) -> control.DescribePodResponse:
        return await self.describe(request.pod, ask=True)

    async def describe(self, pod: str, *, ask: bool) -> control.DescribePodResponse:
        """Answer as DescribePod. :param ask: whether the ways into a guest without an agent are asked now."""
        meant = find_sandbox(self._inventory, pod)
        answer = control.DescribePodResponse(steps=_steps(meant.timeline), left_out=meant.timeline.left_out)
        if isinstance(meant, PastSandbox):
            answer.pod.CopyFrom(past_pod(meant))
            return answer
        answer.pod.CopyFrom(shown_pod(self._providers, self._handlers, meant))
        containers = sorted(meant.containers.values(), key=lambda container: container.record.created_at)
        answer.containers.extend(_container(container) for container in containers)
        guest = await look(self._clock, self._providers, meant, ask=ask)
        if guest is not None:
            answer.guest.CopyFrom(_guest(guest))
            answer.pod.way = way_of(meant)  # which may be another one by now
        return answer

    async def ListContainers(
        self, request: control.ListContainersRequest, call: Call
    ) -> AsyncIterator[control.ListContainersResponse]:
        sandboxes = list(self._inventory)
        for some in _in_turn(
            [container for sandbox in sandboxes for container in sandbox.containers.values()]
        ):
            yield control.ListContainersResponse(containers=map(_listed, some))

    async def ListEvents(
        self, request: control.ListEventsRequest, call: Call
    ) -> AsyncIterator[control.ListEventsResponse]:
        newest = self._newest(request.pod, request.since, MAX_EVENTS)
        for some in _in_turn(newest[::-1]):
            yield control.ListEventsResponse(events=[_event(*each) for each in some])

    def newest_events(self, pod: str, most: int) -> list[control.Event]:
        """Return a pod's events, the newest first. Errors as of `find_sandbox`."""
        return [_event(*each) for each in self._newest(pod, 0, most)]

    def _newest(self, pod: str, since: int, most: int) -> list[tuple[Sandbox | PastSandbox, Step]]:
        """Return the newest steps, each with its sandbox. :param pod: "": of all."""
        inventory = self._inventory
        meant: Iterable[Sandbox | PastSandbox] = [*inventory.past, *inventory]
        if pod:
            name = find_sandbox(inventory, pod).pod
            meant = [sandbox for sandbox in meant if sandbox.pod == name]
        steps = (
            (step.at, number, each, step)
            for number, each in enumerate(meant)
            for step in each.timeline.steps
            if not step.until or max(step.at, step.until) >= since
        )
        newest = heapq.nlargest(most, steps, key=lambda entry: entry[:2])
        return [(each, step) for _, _, each, step in newest]


def _in_turn(entries: Sequence[_T]) -> Iterator[Sequence[_T]]:
    """Yield the entries, some at a time: an answer of all would hold the reactor up."""
    rest = iter(entries)
    while some := list(islice(rest, AT_ONCE)):
        yield some


def _pod_of(sandbox: Sandbox | PastSandbox) -> control.PodOfEntry:
    """Return whose entry it is. A pod that is gone is remembered without its labels."""
    if isinstance(sandbox, PastSandbox):
        metadata, labels = sandbox.metadata, {}
    else:
        metadata, labels = sandbox.config.metadata, dict(sandbox.config.labels)
    return control.PodOfEntry(
        sandbox_id=sandbox.record.id, namespace=metadata.namespace, name=metadata.name, labels=labels
    )


def _event(sandbox: Sandbox | PastSandbox, step: Step) -> control.Event:
    return control.Event(pod=_pod_of(sandbox), step=_step(step))


def _listed(container: Container) -> control.ListedContainer:
    return control.ListedContainer(pod=_pod_of(container.sandbox), container=_container(container))


def _steps(timeline: Timeline) -> list[control.Step]:
    return [_step(step) for step in timeline.steps]


def _step(step: Step) -> control.Step:
    return control.Step(
        what=step.what,
        began_at=step.at,
        ended_at=step.until,
        container=step.container,
        detail=step.detail,
        error=step.error,
    )


def _guest(guest: GuestView) -> control.Guest:
    shown = control.Guest(
        way=guest.way,
        troubles=[
            control.WayTrouble(way=way, trouble=bounded(redacted(trouble)))
            for way, trouble in guest.troubles.items()
        ],
        trouble=redacted(guest.trouble),
    )
    if guest.status is not None:
        status = guest.status
        shown.state, shown.exit_code = status.state.value, status.exit_code
        shown.started_at, shown.finished_at = status.started_at, status.finished_at
        shown.reason, shown.message = bounded(status.reason), bounded(redacted(status.message))
    return shown


def _container(container: Container) -> control.PodContainer:
    record, config = container.record, container.config
    directory = container.sandbox.config.log_directory
    return control.PodContainer(
        id=container.id,
        name=config.metadata.name,
        attempt=config.metadata.attempt,
        state=record.state.value,
        image=config.image.user_specified_image or config.image.image,
        created_at=record.created_at,
        started_at=record.started_at,
        finished_at=record.finished_at,
        exit_code=record.exit_code,
        reason=bounded(record.reason),
        message=bounded(record.message),
        log_directory=directory if config.log_path else "",
        log_path=config.log_path if directory else "",
    )
