# SPDX-License-Identifier: Apache-2.0
"""The CRI's two services on a node with a delegate: each call goes to its owner, or to both.

What goes to the delegate goes as it came, and so does what it answers: fields that this release doesn't know
are kept. What is ours is parsed as ever.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import aclosing
from functools import partial

import attrs
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import Message
from twisted.internet.defer import succeed
from twisted.logger import Logger

from infranetes.delegate.channel import Delegate
from infranetes.delegate.events import DelegateEvents
from infranetes.delegate.hidden import UNLABELLED, refuse_label
from infranetes.delegate.lists import joined, only_new
from infranetes.delegate.owners import Owned, Owners
from infranetes.delegate.routes import CRI, ROUTES, Route
from infranetes.delegate.status import with_additions
from infranetes.delegate.wire import message_field, string_field
from infranetes_common.concurrency import start
from infranetes_common.errors import InvalidArgument, Unavailable, Unimplemented
from infranetes_common.wire import cri
from txgrpc import Call, Code, GrpcError, Service
from txgrpc.raw import relayed
from txgrpc.service import Answer, Method

SANDBOX_STATUS = "/runtime.v1.RuntimeService/PodSandboxStatus"
LIST_SANDBOXES = "/runtime.v1.RuntimeService/ListPodSandbox"
CONTAINER_STATUS = "/runtime.v1.RuntimeService/ContainerStatus"
_log = Logger()


@attrs.frozen
class Ours:
    """This daemon's own handler of an RPC, from bytes to bytes.

    :ivar answer: the function that answers it; None: the daemon does not offer the RPC.
    """

    method: Method
    answer: Answer | None

    @property
    def offered(self) -> bool:
        """Whether the daemon offers the RPC."""
        return self.answer is not None

    async def call(self, request: bytes, call: Call) -> bytes:
        """Answer a unary call."""
        if self.answer is None:
            raise Unimplemented(f"{self.method.name} is not offered for pods in VMs")
        return _serialized(await self.answer(self._parsed(request), call))

    async def stream(self, request: bytes, call: Call) -> AsyncGenerator[bytes, None]:
        """Answer a call with a stream of responses; with none if nothing answers it."""
        if self.answer is None:
            return
        async with aclosing(self.answer(self._parsed(request), call)) as responses:
            async for response in responses:
                for one in response if isinstance(response, list) else [response]:
                    yield _serialized(one)

    def _parsed(self, request: bytes) -> Message:
        try:
            return self.method.request_class.FromString(request)
        except Exception:  # DecodeError; its class differs between protobuf's implementations
            name = self.method.request_class.DESCRIPTOR.full_name
            raise InvalidArgument(f"the request is not a {name}") from None


def _serialized(response: Message | bytes) -> bytes:
    return response if isinstance(response, bytes) else response.SerializeToString()


class Router:
    """Answers both services of the CRI.

    :param ours: our own services. :param events: the delegate's changes, which our own listeners are told.
    """

    def __init__(
        self,
        delegate: Delegate,
        owners: Owners,
        ours: Iterable[Service],
        events: DelegateEvents,
    ) -> None:
        self._delegate = delegate
        self._owners = owners
        self._events = events
        self._ours = {method.path: answer for service in ours for method, answer in service.answers.items()}
        self._ways: dict[Route, Callable[[Ours], Answer]] = {
            Route.SANDBOX: partial(self._by_id, owners.sandbox, SANDBOX_STATUS),
            Route.CONTAINER: partial(self._by_id, owners.container, CONTAINER_STATUS),
            Route.HANDLER: self._by_handler,
            Route.IMAGE: self._by_image,
            Route.LIST: partial(self._list, joined),
            Route.DESCRIPTORS: partial(self._list, only_new),
            Route.PAGES: self._pages,
            Route.STATUS: self._status,
            Route.DELEGATE: self._by_delegate,
            Route.EVENTS: self._all_events,
        }

    def services(self) -> list[Service]:
        """Return both services, with every RPC that this release's CRI has."""
        return [self._service(described) for described in (cri.RuntimeService, cri.ImageService)]

    def unknown(self, path: str) -> tuple[Method, Answer] | None:
        """Return what answers an RPC of a newer CRI: the delegate."""
        return relayed(self._delegate.stub, path) if path.startswith(CRI) else None

    def _service(self, described: ServiceDescriptor) -> Service:
        answers: dict[Method, Answer] = {}
        for each in described.methods:
            method = Method.from_descriptor(each)
            ours = Ours(method, self._ours.get(method.path))
            answers[attrs.evolve(method, raw=True)] = self._ways[ROUTES[method.path]](ours)
        return Service.of(described.full_name, answers)

    # The ways

    def _by_id(self, owned: Callable[[str], Owned], status: str, ours: Ours) -> Answer:
        async def answer(request: bytes, call: Call) -> bytes:
            id = string_field(request)
            owner = owned(id)
            if owner is Owned.MAYBE:
                owner = await self._asked(status, id, call)
            if owner is Owned.OURS:
                return await ours.call(request, call)
            return await self._theirs(ours.method, request, call)

        return answer

    async def _asked(self, status: str, id: str, call: Call) -> Owned:
        """Return the owner of an id that begins with `id`, as one of ours does.

        :raise InvalidArgument: one of theirs does, too."""
        # ContainerStatusRequest is the same on the wire.
        request = cri.PodSandboxStatusRequest(pod_sandbox_id=id)
        try:
            await self._delegate.call(status, request.SerializeToString(), call)
        except GrpcError as error:
            if error.code is Code.NOT_FOUND:
                return Owned.OURS
            raise
        raise InvalidArgument(
            f"{id}: ids of both a pod in a VM and of the delegate begin with this; give more characters"
        )

    def _by_handler(self, ours: Ours) -> Answer:
        async def answer(request: bytes, call: Call) -> bytes:
            name = string_field(request, 2)
            if self._owners.handler(name):
                self._delegate.check(self._owners.needs(name))
                return await ours.call(request, call)
            refuse_label(request)
            return await self._theirs(ours.method, request, call)

        return answer

    def _by_image(self, ours: Ours) -> Answer:
        async def answer(request: bytes, call: Call) -> bytes:
            if self._owners.image(string_field(message_field(request, 1))):
                return await ours.call(request, call)
            return await self._theirs(ours.method, request, call)

        return answer

    def _by_delegate(self, ours: Ours) -> Answer:
        return partial(self._theirs, ours.method)

    def _list(self, join: Callable[[bytes, bytes], bytes], ours: Ours) -> Answer:
        async def answer(request: bytes, call: Call) -> bytes:
            """Ask both at once. The delegate's failure is the call's."""
            mine = start(ours.call(request, call)) if ours.offered else succeed(b"")
            try:
                theirs = await self._theirs(ours.method, request, call)
            except BaseException:
                mine.addErrback(lambda _: None)
                mine.cancel()
                raise
            return join(await mine, await self._without_shadows(ours.method.name, theirs, call))

        return answer

    def _pages(self, ours: Ours) -> Answer:
        name = ours.method.name

        async def answer(request: bytes, call: Call) -> AsyncIterator[bytes]:
            async with aclosing(self._delegate.stream(ours.method.path, request, call)) as theirs:
                # The client would believe half of a list: ours is not sent before the delegate has answered.
                first = await anext(theirs, None)
                async with aclosing(ours.stream(request, call)) as mine:
                    async for page in mine:
                        yield page
                if first is not None:
                    yield await self._without_shadows(name, first, call)
                async for page in theirs:
                    yield await self._without_shadows(name, page, call)

        return answer

    async def _without_shadows(self, rpc: str, listed: bytes, call: Call) -> bytes:
        """Return the delegate's list without shadow sandboxes, which no client is shown."""
        hidden, sandboxes = self._delegate.hidden, b""
        if rpc in UNLABELLED and listed:  # its items have no labels; those of ListPodSandbox do
            sandboxes = await self._delegate.call(LIST_SANDBOXES, b"", call)
        try:
            hidden.without_shadows("ListPodSandbox", sandboxes)
            return hidden.without_shadows(rpc, listed)
        except Exception:  # InvalidArgument or DecodeError; its class differs between implementations
            raise Unavailable(f"the delegate's answer to {rpc} can't be read") from None

    def _status(self, ours: Ours) -> Answer:
        async def answer(request: bytes, call: Call) -> bytes:
            theirs = await self._theirs(ours.method, request, call)
            return with_additions(theirs, await ours.call(request, call), self._delegate, self._owners)

        return answer

    def _all_events(self, ours: Ours) -> Answer:
        async def answer(request: bytes, call: Call) -> AsyncIterator[bytes]:
            with self._events.listening():
                async with aclosing(ours.stream(request, call)) as events:
                    async for event in events:
                        yield event

        return answer

    async def _theirs(self, method: Method, request: bytes, call: Call) -> bytes:
        try:
            response = await self._delegate.call(method.path, request, call)
        except Exception as error:
            _log.debug("delegate {rpc} failed: {error}", rpc=method.name, error=error)
            raise
        _log.debug("delegate {rpc}", rpc=method.name)
        return response
