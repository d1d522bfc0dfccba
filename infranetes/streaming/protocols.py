# SPDX-License-Identifier: Apache-2.0
"""The sub-protocols of Kubernetes' streams, and which of them to use (source: k8s.io/streaming)."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

#: exec and attach over SPDY, best first.
COMMAND_SPDY = ("v4.channel.k8s.io", "v3.channel.k8s.io", "v2.channel.k8s.io", "v1.channel.k8s.io")
PORT_FORWARD_SPDY = ("portforward.k8s.io",)
#: A port-forward's SPDY connection inside a WebSocket's binary messages.
TUNNEL = "SPDY/3.1+portforward.k8s.io"


@attrs.frozen
class Dialect:
    """The behaviour of an agreed sub-protocol.

    `version` 1 to 5: from 3 on a terminal has a resize channel, from 4 on an exit is a JSON Status, 5 has the
    close signal. `base64`: WebSocket messages are base64 text.
    """

    name: str
    version: int
    base64: bool = False


def _websocket() -> dict[str, Dialect]:
    dialects = {
        "": Dialect("", 1),
        "channel.k8s.io": Dialect("channel.k8s.io", 1),
        "base64.channel.k8s.io": Dialect("base64.channel.k8s.io", 1, base64=True),
        "v5.channel.k8s.io": Dialect("v5.channel.k8s.io", 5),
    }
    for version in range(1, 5):
        for form in ("", "base64."):
            name = f"v{version}.{form}channel.k8s.io"
            dialects[name] = Dialect(name, version, bool(form))
    return dialects


COMMAND_WEBSOCKET = _websocket()
#: Port-forward has only channels: no exit code, no terminal and no close signal.
PORT_FORWARD_WEBSOCKET = {
    name: dialect for name, dialect in COMMAND_WEBSOCKET.items() if dialect.version < 5
} | {TUNNEL: Dialect(TUNNEL, 1)}


def spdy_dialect(name: str) -> Dialect:
    """Return the dialect of a sub-protocol of SPDY."""
    return Dialect(name, int(name[1])) if name.startswith("v") else Dialect(name, 1)


def choose(offered: Sequence[str], ours: Sequence[str]) -> str | None:
    """Return the first that the client offers and we have; None if there is none."""
    return next((name for name in offered if name in ours), None)


def offered(values: Sequence[bytes]) -> list[str]:
    """Return the names in the values of a header that may be repeated or have commas."""
    return [name for value in values for part in value.decode("latin-1").split(",") if (name := part.strip())]
