# SPDX-License-Identifier: Apache-2.0
"""A bridge and a subnet for this process's VMs, which no other process of tests on this machine uses."""

from __future__ import annotations

import fcntl
import functools
import os
from pathlib import Path

import attrs

_LOCKS = Path("/run/lock")
_COUNT = 64


@attrs.frozen
class PodNetwork:
    """A bridge and its subnet. :ivar number: its number, from 0."""

    number: int

    @property
    def bridge(self) -> str:
        return f"infpod{self.number}"

    @property
    def subnet(self) -> str:
        return f"10.85.{self.number}.0/24"

    @property
    def node(self) -> str:
        """The bridge's address, at which VMs reach the node."""
        return f"10.85.{self.number}.1"


@functools.cache
def pod_network() -> PodNetwork:
    """Return this process's network, which it keeps as long as it runs."""
    for number in range(_COUNT):
        lock = os.open(
            _LOCKS / f"infranetes-test-network-{number}", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600
        )
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
        else:
            return PodNetwork(number)
    raise RuntimeError(f"{_COUNT} processes of tests have networks for VMs: some of them have to end")
