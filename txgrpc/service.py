# SPDX-License-Identifier: Apache-2.0
"""A service's methods, found through its protobuf descriptor."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, MethodDescriptor, ServiceDescriptor
from google.protobuf.descriptor_pb2 import MethodDescriptorProto
from google.protobuf.message import Message

if TYPE_CHECKING:
    from txgrpc.servercall import Call

MessageT = TypeVar("MessageT", bound=Message)

Response = Awaitable[MessageT | bytes]
"""What a method with one response returns: the message, or the bytes of one."""

Responses = AsyncIterator[MessageT | bytes | list[MessageT] | list[bytes]]
"""What a method with a stream of responses returns. A list is sent as a message for each, at once."""

Answer = Callable[[Any, "Call"], Any]  # Any: the descriptor defines the types of both
"""A callable that answers one RPC; see :class:`Service`."""

Interceptor = Callable[["Method", Answer], Answer]
"""``interceptor(method, answer)`` returns a replacement for `answer`, which answers `method`."""


@attrs.frozen
class Method:
    """One RPC: its path (``/package.Service/Method``), its kind and its messages' classes."""

    name: str
    path: str
    request_class: type[Message]
    response_class: type[Message]
    client_streaming: bool
    server_streaming: bool
    raw: bool = False  # requests and responses are bytes, which are not parsed here

    @classmethod
    def from_descriptor(cls, described: MethodDescriptor) -> Method:
        written = MethodDescriptorProto()  # 4.21 of PyPI tells only there what is streamed
        described.CopyToProto(written)
        return cls(
            name=described.name,
            path=f"/{described.containing_service.full_name}/{described.name}",
            request_class=message_class(described.input_type),
            response_class=message_class(described.output_type),
            client_streaming=written.client_streaming,
            server_streaming=written.server_streaming,
        )


def message_class(described: Descriptor) -> type[Message]:
    """Return the Python class of a message, of any descriptor pool and with any protobuf release."""
    factory: Any = message_factory  # Any: functions differ between releases
    if hasattr(factory, "GetMessageClass"):
        found: type[Message] = factory.GetMessageClass(described)
        return found
    old: Any = described  # Any: before 4.22
    try:
        found = old._concrete_class
    except (AttributeError, TypeError, SystemError):  # the class is not made yet; the last is of PyPI's 4.21
        found = factory.MessageFactory(described.file.pool).GetPrototype(described)
    return found


class Service:
    """The methods of a protobuf service, each with the coroutine function that answers it.

    An implementation is any object that has, for each RPC that it offers, an attribute of the RPC's name,
    which takes the request (for a client-streaming RPC: an async iterator of requests) and the
    :class:`~txgrpc.server.Call`. It is an ``async def`` returning the response (or its bytes), or an async
    generator of them where the RPC streams them.

    A large service may be spread over several implementations, of which some may be None. An RPC that none of
    them offers is answered with UNIMPLEMENTED.

    :ivar name: the full name, ``package.Service``.
    :ivar answers: the function that answers each offered method.
    :raise ValueError: two implementations offer the same RPC.
    """

    def __init__(self, descriptor: ServiceDescriptor, *implementations: object) -> None:
        self.name = descriptor.full_name
        self.answers: dict[Method, Answer] = {}
        for described in descriptor.methods:
            method = Method.from_descriptor(described)
            offering = [one for one in implementations if getattr(one, method.name, None) is not None]
            if len(offering) > 1:
                names = " and ".join(type(one).__name__ for one in offering)
                raise ValueError(f"{method.path} is offered by {names}: leave it to one of them")
            if offering:
                self.answers[method] = getattr(offering[0], method.name)

    @classmethod
    def of(cls, name: str, answers: Mapping[Method, Answer]) -> Service:
        """Return a service of the given methods, such as raw ones.

        :param name: the full name, ``package.Service``."""
        service = cls.__new__(cls)
        service.name = name
        service.answers = dict(answers)
        return service

    def intercept(self, interceptor: Interceptor) -> Service:
        """Put `interceptor` in front of each method's answer. Returns this service."""
        self.answers = {method: interceptor(method, answer) for method, answer in self.answers.items()}
        return self
