# SPDX-License-Identifier: Apache-2.0
"""gRPC for Twisted: Deferreds in and out, h2 underneath.

A server is a list of services and a factory for any endpoint::

    server = Server(reactor, [Service(demo_pb2.DESCRIPTOR.services_by_name["Demo"], Demo())])
    endpoint.listen(server.factory)

A service may be spread over several implementations, ``Service(descriptor, one, another)``.

A client is a channel to an endpoint and a stub of a service on it (see :class:`~txgrpc.client.Stub`)::

    class DemoStub(Stub):
        service = demo_pb2.DESCRIPTOR.services_by_name["Demo"]
        Hello: Unary[demo_pb2.HelloRequest, demo_pb2.HelloResponse]

    channel = Channel(reactor, endpoint)
    response = await DemoStub(channel).Hello(request, timeout=5.0)

A proxy need not parse messages: see :mod:`txgrpc.raw`.
"""

from txgrpc.channel import Channel
from txgrpc.client import StreamCall
from txgrpc.limits import Limits
from txgrpc.server import Call, Server
from txgrpc.service import Service
from txgrpc.status import Code, Disconnected, GrpcError

__all__ = [
    "Call",
    "Channel",
    "Code",
    "Disconnected",
    "GrpcError",
    "Limits",
    "Server",
    "Service",
    "StreamCall",
]
