"""A service's methods, found through its protobuf descriptor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, MethodDescriptor, ServiceDescriptor


@attrs.frozen
class Method:
    """One RPC: its path (``/package.Service/Method``), its kind and its messages' classes."""

    name: str
    path: str
    request_class: Any
    response_class: Any
    client_streaming: bool
    server_streaming: bool

    @classmethod
    def from_descriptor(cls, described: MethodDescriptor) -> Method:
        return cls(
            name=described.name,
            path=f"/{described.containing_service.full_name}/{described.name}",
            request_class=message_class(described.input_type),
            response_class=message_class(described.output_type),
            client_streaming=bool(described.client_streaming),
            server_streaming=bool(described.server_streaming),
        )


def message_class(described: Descriptor) -> Any:
    """The Python class of a message, whatever pool it is in and whichever protobuf release this is."""
    factory: Any = message_factory
    if hasattr(factory, "GetMessageClass"):
        return factory.GetMessageClass(described)
    old: Any = described
    try:  # before 4.22
        return old._concrete_class
    except (AttributeError, TypeError):  # nobody has made it yet
        return factory.MessageFactory(described.file.pool).GetPrototype(described)


class Service:
    """An object whose coroutines answer the methods of a protobuf service.

    `implementation` has, for each RPC that it offers, an attribute of the RPC's name, taking the request
    (for a client-streaming RPC: an async iterator of requests) and the :class:`~txgrpc.server.Call`.
    It is an ``async def`` returning the response (or its bytes), or an async generator of them where the RPC
    streams them. RPCs that it lacks answer UNIMPLEMENTED.
    """

    def __init__(self, descriptor: ServiceDescriptor, implementation: object) -> None:
        self.name = descriptor.full_name
        self.methods: dict[str, tuple[Method, Callable[..., Any] | None]] = {}
        for described in descriptor.methods:
            method = Method.from_descriptor(described)
            self.methods[method.path] = method, getattr(implementation, method.name, None)
