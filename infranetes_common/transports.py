# SPDX-License-Identifier: Apache-2.0
"""The types of Twisted's transports, each of which provides several of its interfaces."""

from __future__ import annotations

from twisted.internet.interfaces import (
    IConsumer,
    IPushProducer,
    ISystemHandle,
    ITCPTransport,
    ITransport,
    IUNIXTransport,
)


class ByteTransport(ITransport, IPushProducer, IConsumer):
    """A transport of bytes in both directions, with flow control, whatever it is made of."""

    def abortConnection() -> None:
        """Close the connection at once, and drop what is not sent."""


class StreamTransport(ByteTransport, ITCPTransport):
    """The transport of a TCP, TLS or unix connection."""


class UnixTransport(StreamTransport, IUNIXTransport, ISystemHandle):
    """The transport of a unix connection, which can send file descriptors too."""


class BodyTransport(ITransport, IPushProducer):
    """The transport of a protocol that receives the body of an HTTP response."""
