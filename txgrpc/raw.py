# SPDX-License-Identifier: Apache-2.0
"""Calls whose messages are not parsed: the parts of a proxy between a client and another server.

A raw method's requests and responses are bytes. A proxy offers raw methods (`raw_method`, or a descriptor's
with ``raw=True``) by ``Service.of``, and calls the other server by a `RawStub`. `relay` serves a method
that is known only by its path, for ``Server(unknown=...)``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from typing import Unpack

from google.protobuf.message import Message
from twisted.internet.defer import Deferred

from txgrpc.channel import Channel
from txgrpc.client import Bidirectional, Download, Options, StreamCall, Unary
from txgrpc.exchange import Pairs
from txgrpc.servercall import Call
from txgrpc.service import Answer, Method

# Metadata in which a client describes itself; the proxy's channel sends its own.
_OWN = frozenset({"user-agent"})


def raw_method(path: str, *, client_streaming: bool = False, server_streaming: bool = False) -> Method:
    """Return the raw method at `path`, ``/package.Service/Method``."""
    name = path.rpartition("/")[2]
    return Method(name, path, Message, Message, client_streaming, server_streaming, raw=True)


def metadata_of(call: Call) -> Pairs:
    """Return the metadata of a call as it can be passed on."""
    return tuple(pair for pair in call.metadata if pair[0] not in _OWN)


class RawStub:
    """Calls methods of a remote server by their paths, with bytes.

    :param channel: the channel to it. A call ends with the server's own status, unchanged.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def call(self, path: str, request: bytes, **options: Unpack[Options]) -> Deferred[bytes]:
        """Call a method with one response. The Deferred may be cancelled, and the call with it."""
        rpc: Unary[bytes, bytes] = Unary(self._channel, raw_method(path))
        return rpc(request, **options)

    def stream(self, path: str, request: bytes, **options: Unpack[Options]) -> StreamCall[bytes, bytes]:
        """Call a method with one request and a stream of responses."""
        rpc: Download[bytes, bytes] = Download(self._channel, raw_method(path, server_streaming=True))
        return rpc(request, **options)

    def open(self, path: str, **options: Unpack[Options]) -> StreamCall[bytes, bytes]:
        """Call a method of unknown kind: send any number of requests, then end them."""
        method = raw_method(path, client_streaming=True, server_streaming=True)
        rpc: Bidirectional[bytes, bytes] = Bidirectional(self._channel, method)
        return rpc(**options)


async def relay(stub: RawStub, requests: AsyncIterator[bytes], call: Call) -> AsyncIterator[bytes]:
    """Answer a call of any kind by making the same call to the server behind `stub`.

    Messages are passed on one by one, both ways, as they arrive; so are the deadline, the caller's metadata,
    the cancellation, and the status. On the wire, a unary call streams one message each way.
    """
    onward = stub.open(call.method, timeout=call.time_remaining(), metadata=metadata_of(call))

    async def feed() -> None:
        async for request in requests:
            await onward.send(request)
        await onward.done_sending()

    feeding = Deferred.fromCoroutine(feed())
    # If requests can't be read or sent any more, the end of the call itself has the reason.
    feeding.addErrback(lambda _: onward.cancel())
    try:
        async with onward:
            async for response in onward:
                yield response
        call.set_trailing_metadata(onward.trailing_metadata)
    finally:
        feeding.cancel()


def relayed(stub: RawStub, path: str) -> tuple[Method, Answer]:
    """Return the relayed method at `path`, and the function that answers it, for ``Server(unknown=...)``."""
    return raw_method(path, client_streaming=True, server_streaming=True), partial(relay, stub)
