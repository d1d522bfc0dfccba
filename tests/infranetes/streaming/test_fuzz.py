# SPDX-License-Identifier: Apache-2.0
"""Conversations that are valid except for a few bytes, for `FUZZ_SECONDS`, by default 1 s, for each wire.

Any input is either understood or refused with a message; a wire raises nothing else. A failure names its
seed: with `FUZZ_SEED`, only that conversation is repeated."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from typing import Any

from twisted.internet.testing import StringTransport
from twisted.trial.unittest import SynchronousTestCase
from wsproto.connection import Connection, ConnectionType
from wsproto.events import BytesMessage, CloseConnection, Event, Ping, TextMessage

from infranetes.streaming.channels import Channel, Flow
from infranetes.streaming.spdy import Spdy
from infranetes.streaming.spdywire import SpdyWire
from infranetes.streaming.tunnel import TunnelWire
from infranetes.streaming.websocketwire import WebSocketWire
from infranetes_common.errors import InvalidArgument
from tests.harness.needs import repetitions
from tests.infranetes.streaming.client import take

SECONDS = float(os.environ.get("FUZZ_SECONDS") or repetitions(1, nightly=10))
SEED = os.environ.get("FUZZ_SEED", "")


def spdy_conversation(chance: random.Random) -> bytes:
    """Return what a client of exec might send: random streams and bytes."""
    client = Spdy(client=True)
    streams = [client.open_stream({"streamtype": name}) for name in ("error", "stdin", "stdout", "resize")]
    for _ in range(chance.randrange(6)):
        client.send_data(chance.choice(streams), chance.randbytes(chance.randrange(300)))
    for stream in streams:
        chance.choice([client.finish, client.reset, lambda _: None])(stream)
    if chance.random() < 0.5:
        client.go_away()
    return client.take_output()


def websocket_conversation(chance: random.Random) -> bytes:
    """Return messages of every kind."""
    client = Connection(ConnectionType.CLIENT)
    said = b""
    for _ in range(chance.randrange(1, 8)):
        data = bytes([chance.randrange(5)]) + chance.randbytes(chance.randrange(300))
        choice: list[Event] = [
            BytesMessage(data=data),
            TextMessage(data="0aGVsbG8="),
            BytesMessage(data=b"\xff\0"),
            Ping(payload=b"x"),
        ]
        said += client.send(chance.choice(choice))
    return said + client.send(CloseConnection(code=1000)) if chance.random() < 0.5 else said


def tunnel_conversation(chance: random.Random) -> bytes:
    """Return SPDY in WebSocket messages."""
    client = Connection(ConnectionType.CLIENT)
    inner = mutated(spdy_conversation(chance), chance)
    return b"".join(client.send(BytesMessage(data=piece)) for piece in pieces(inner, chance))


def mutated(data: bytes, chance: random.Random) -> bytes:
    """Return `data` with a few bytes changed, deleted, doubled or inserted."""
    found = bytearray(data)
    for _ in range(chance.randrange(6)):
        at, size = chance.randrange(len(found) + 1), chance.randrange(1, 12)
        kind = chance.randrange(5)
        if kind == 0 and at < len(found):
            found[at] ^= 1 << chance.randrange(8)
        elif kind == 1:
            del found[at : at + size]
        elif kind == 2:
            found[at:at] = found[at : at + size]
        elif kind == 3:
            found[at:at] = chance.randbytes(size)
        else:
            found[at : at + size] = b"\xff" * size
    return bytes(found)


def pieces(data: bytes, chance: random.Random) -> list[bytes]:
    """Split `data` as a socket might."""
    found, at = [], 0
    while at < len(data):
        size = chance.choice([1, 7, 64, 4096])
        found.append(data[at : at + size])
        at += size
    return found


class FuzzTests(SynchronousTestCase):
    def fuzz(self, conversation: Callable[[random.Random], bytes], wire: Callable[[Any], Any]) -> None:
        until = time.monotonic() + SECONDS
        seeds = [SEED] if SEED else (str(number) for number in iter(lambda: random.getrandbits(64), None))
        tried = refused = 0
        for seed in seeds:
            chance = random.Random(seed)  # noqa: S311 - no secret
            try:
                refused += not self.survives(wire, pieces(mutated(conversation(chance), chance), chance))
            except Exception as error:
                self.fail(f"FUZZ_SEED={seed}: {type(error).__name__}: {error}")
            tried += 1
            if time.monotonic() > until:
                break
        if not SEED:
            self.assertGreater(refused, 0, "nothing that was said was wrong")
            self.assertGreater(tried, refused, "all that was said was wrong")

    def survives(self, make: Callable[[Any], Any], said: list[bytes]) -> bool:
        """Return whether all of it was understood."""
        transport = StringTransport()
        wire = make(transport)
        try:
            for piece in said:
                take(wire, piece)
            return True
        except InvalidArgument:
            return False
        finally:
            wire.close()
            wire.flow.connection_lost()
            wire.connection_lost()

    def test_spdy(self) -> None:
        def wire(transport: Any) -> SpdyWire:
            return SpdyWire(Flow(transport), transport.write, taken)

        self.fuzz(spdy_conversation, wire)

    def test_websocket(self) -> None:
        for form in (False, True):

            def wire(transport: Any, form: bool = form) -> WebSocketWire:
                return WebSocketWire(
                    Flow(transport),
                    transport.write,
                    ("stdin", "stdout", "stderr", "error", "resize"),
                    base64_form=form,
                    close_signal=not form,
                    closed=lambda: None,
                )

            self.fuzz(websocket_conversation, wire)

    def test_spdy_in_websocket(self) -> None:
        def wire(transport: Any) -> TunnelWire:
            return TunnelWire(Flow(transport), transport.write, taken, lambda: None)

        self.fuzz(tunnel_conversation, wire)


def taken(channel: Channel) -> bool:
    """Accept every second stream."""
    return channel.key % 4 == 1
