# SPDX-License-Identifier: Apache-2.0
"""The table `[streaming]` of the configuration."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from ipaddress import IPv4Address

import attrs

from infranetes_common import config_outside as outside

_HOST = re.compile(r"([0-9A-Za-z.-]{1,253}|\[[0-9A-Fa-f:.]+\])?")


@attrs.frozen
class StreamingConfig:
    """Where exec, attach and port-forward are served."""

    host: str = "127.0.0.1"  # an IPv4 address of the node
    port: int = 0  # 0: any that is free
    advertise: str = ""  # the host in the URLs that kubelet is given; empty: host

    def look_outside(self, is_set: Callable[[str], bool]) -> Iterator[outside.Finding]:
        """Look whether it can be listened on."""
        if any(streaming_faults(self)):
            return
        for key in ("port", "host"):
            if is_set(key):
                yield from (attrs.evolve(said, key=key) for said in outside.listening(self.host, self.port))
                return


def streaming_faults(streaming: StreamingConfig) -> Iterator[str]:
    """Yield what is wrong with the table `streaming`."""
    try:
        address = IPv4Address(streaming.host)
    except ValueError:
        yield f"streaming.host: {streaming.host!r} is not an IPv4 address"
    else:
        if address.is_unspecified and not streaming.advertise:
            yield (
                f"streaming.advertise: with the host {address} it has to say by which name or address "
                "kubelet reaches this node"
            )
    if not 0 <= streaming.port < 65536:
        yield f"streaming.port: {streaming.port} is not 0 to 65535"
    if not _HOST.fullmatch(streaming.advertise):
        yield f"streaming.advertise: {streaming.advertise!r} is not a host name or address"
