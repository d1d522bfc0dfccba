# SPDX-License-Identifier: Apache-2.0
"""Requests with anything in any field: they are taken or refused, and whatever they leave can be removed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, TypeAlias, cast

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from twisted.internet.defer import Deferred

from infranetes.cri.containers import ContainerCalls
from infranetes.cri.sandboxes import SandboxCalls
from infranetes_common.concurrency import start
from infranetes_common.errors import InfranetesError
from infranetes_common.wire import cri
from tests.harness.durations import slow
from tests.harness.needs import repetitions
from tests.infranetes.cri.support import NO_CALL
from tests.infranetes.pods.case import PodsTestCase
from tests.infranetes.pods.fakes import box, pod
from txgrpc import Call

Put: TypeAlias = Callable[[Message], None]

ALL_TEXTS = ("/../../etc", "a\0b", "x" * 5000, "", "..", "/", "a\nb", "fe80::1%x\ny", "-1", "*", "%s{0}", " ")
TEXTS = ALL_TEXTS[: repetitions(3, nightly=len(ALL_TEXTS))]
NUMBERS = (-(2**31), -1, 0, 1, 2**31 - 1)
DEPTH = 5  # of messages in messages


def places(message: Message, depth: int = DEPTH) -> Iterator[Put]:
    """Yield what puts each hostile value into each field of a message, and of those within it."""
    for field in cast("Iterable[FieldDescriptor]", message.DESCRIPTOR.fields):
        for value in _values(field):
            yield partial(_put, field, value)
        inner = field.message_type
        if inner is not None and depth and not inner.GetOptions().map_entry:
            for put in places(_within(field, type(message)()), depth - 1):
                yield partial(_put_within, field, put)


def _values(field: FieldDescriptor) -> tuple[object, ...]:
    inner = field.message_type
    if inner is not None:
        is_map = inner.GetOptions().map_entry
        return TEXTS if is_map and inner.fields_by_name["value"].type == field.TYPE_STRING else ()
    if field.type == field.TYPE_STRING:
        return TEXTS
    if field.type == field.TYPE_BYTES:
        return tuple(text.encode() for text in TEXTS)
    if field.type == field.TYPE_ENUM:
        return tuple(value.number for value in field.enum_type.values)
    if field.type == field.TYPE_BOOL:
        return (True,)
    is_signed = field.cpp_type not in (field.CPPTYPE_UINT32, field.CPPTYPE_UINT64)
    return tuple(number for number in NUMBERS if number >= 0 or is_signed)


def _put(field: FieldDescriptor, value: object, message: Message) -> None:
    here = getattr(message, field.name)
    if field.message_type is not None:
        here[value], here["key"] = "value", value
    elif hasattr(here, "append"):
        here.append(value)
    else:
        setattr(message, field.name, value)


def _put_within(field: FieldDescriptor, put: Put, message: Message) -> None:
    put(_within(field, message))


def _within(field: FieldDescriptor, message: Message) -> Message:
    here = getattr(message, field.name)
    inner: Message = here.add() if hasattr(here, "add") else here
    inner.SetInParent()
    return inner


class _Call:
    """A call without a deadline."""

    def time_remaining(self) -> None:
        return None


class HostileRequestTests(PodsTestCase):
    """Every field of the two requests that make something, one at a time."""

    def calls(self) -> tuple[SandboxCalls, ContainerCalls]:
        return self.world.sandbox_calls, self.world.container_calls

    def advance_until(self, work: Deferred[Any]) -> None:  # Any: an answer of any type
        if not work.called:
            self.world.wait(1.0)

    def ended(self, sandboxes: SandboxCalls, id: str) -> None:
        """Stop and remove a pod, as kubelet does."""
        for _ in range(2):
            self.do(sandboxes.StopPodSandbox(cri.StopPodSandboxRequest(pod_sandbox_id=id), NO_CALL))
            self.do(sandboxes.RemovePodSandbox(cri.RemovePodSandboxRequest(pod_sandbox_id=id), NO_CALL))
        self.assertNothingLeft()

    def test_a_pod_of_whatever_configuration_can_be_stopped_and_removed(self) -> None:
        sandboxes, _ = self.calls()
        taken = refused = 0
        for put in places(cri.PodSandboxConfig()):
            config = pod()
            put(config)
            running = start(sandboxes.RunPodSandbox(cri.RunPodSandboxRequest(config=config), NO_CALL))
            self.advance_until(running)
            running.addErrback(lambda failure: failure.trap(InfranetesError) and None)
            taken, refused = taken + bool(self.successResultOf(running)), refused + 1
            for id in [each.id for each in self.world.node.inventory]:
                self.ended(sandboxes, id)
            self.assertNothingLeft()
        self.assertGreater(taken, 100)
        self.assertGreater(refused - taken, 20)

    @slow(3, "it makes and removes a pod for each value of each field")
    def test_a_pod_with_a_container_of_whatever_configuration_can_be_too(self) -> None:
        sandboxes, containers = self.calls()
        taken = 0
        for put in places(cri.ContainerConfig()):
            config, id = box(), self.run_pod()
            put(config)
            request = cri.CreateContainerRequest(pod_sandbox_id=id, config=config, sandbox_config=pod())
            creating = start(containers.CreateContainer(request, cast(Call, _Call())))
            self.advance_until(creating)
            creating.addErrback(lambda failure: failure.trap(InfranetesError) and None)
            taken += bool(self.successResultOf(creating))
            self.ended(sandboxes, id)
        self.assertGreater(taken, 100)
