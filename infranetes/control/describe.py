# SPDX-License-Identifier: Apache-2.0
"""The call of ``proto/control.proto`` that tells what happened to a pod."""

from __future__ import annotations

from infranetes.control.service import past_pod, shown_pod
from infranetes.machines.timeline import Timeline, bounded
from infranetes.pods.node.context import NodeContext
from infranetes.pods.node.inventory import Container, PastSandbox
from infranetes.pods.node.meant import find_sandbox
from infranetes.pods.vm.guest_view import GuestView, look, way_of
from infranetes_common.redaction import redacted
from infranetes_common.wire import control
from infranetes_common.wire.control_rpcs import ControlDescriptionRpcs
from txgrpc import Call


class DescribeCalls(ControlDescriptionRpcs):
    """Answers with a pod's timeline, its containers, and its guest."""

    def __init__(self, node: NodeContext) -> None:
        self._node = node

    async def DescribePod(
        self, request: control.DescribePodRequest, call: Call
    ) -> control.DescribePodResponse:
        meant = find_sandbox(self._node.inventory, request.pod)
        answer = control.DescribePodResponse(steps=_steps(meant.timeline), left_out=meant.timeline.left_out)
        if isinstance(meant, PastSandbox):
            answer.pod.CopyFrom(past_pod(meant))
            return answer
        answer.pod.CopyFrom(shown_pod(self._node, meant))
        containers = sorted(meant.containers.values(), key=lambda each: each.record.created_at)
        answer.containers.extend(_container(each) for each in containers)
        guest = await look(self._node.clock, self._node.providers, meant, ask=True)
        if guest is not None:
            answer.guest.CopyFrom(_guest(guest))
            answer.pod.way = way_of(meant)  # which may be another one by now
        return answer


def _steps(timeline: Timeline) -> list[control.Step]:
    return [
        control.Step(
            what=step.what,
            began_at=step.at,
            ended_at=step.until,
            container=step.container,
            detail=step.detail,
            error=step.error,
        )
        for step in timeline.steps
    ]


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
