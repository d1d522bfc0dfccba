# SPDX-License-Identifier: Apache-2.0
"""The ranges of addresses that pods of a node's tenants have, each of which has to be one tenant's.

A node knows a pod by its address: so do its routes, kubelet's probes and host ports. Two networks with the
same addresses can't both be reached by them. So each provider claims the ranges of its pods when it starts,
and the first one to claim a range has it, also after the daemon's next start.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path

import attrs
from twisted.logger import Logger

from infranetes_common.concurrency import replace_file
from infranetes_common.errors import FailedPrecondition

FILE = "address-ranges.json"
_MOST_BYTES = 1 << 20

_log = Logger()


@attrs.frozen
class AddressRange:
    """Some addresses. :ivar space: within it no address is twice: the id of a network, or of a VPC."""

    space: str
    network: IPv4Network | IPv6Network

    def collides(self, other: AddressRange) -> bool:
        """Return whether an address may be in both, and mean two machines."""
        if self.space == other.space or self.network.version != other.network.version:
            return False
        return self.network.overlaps(other.network)


class AddressRanges:
    """Who has which ranges, kept in a file of the state directory. Its method runs in threads.

    :param claimants: the names of the configured providers and tenants: others' claims have ended."""

    def __init__(self, state_dir: Path, claimants: Collection[str]) -> None:
        self._path = state_dir / FILE
        self._claimants = claimants
        self._lock = threading.Lock()

    def _thd_claim(self, claimant: str, ranges: Sequence[AddressRange]) -> None:
        """Record that a provider's or tenant's pods have these ranges, in place of its earlier ones.

        :raise FailedPrecondition: another one has one of them; the message says which, and what to do. Or the
            file can't be written."""
        with self._lock:
            claims = {name: its for name, its in self._thd_read().items() if name in self._claimants}
            for name, its in claims.items():
                if name != claimant:
                    _check(claimant, ranges, name, its)
            claims[claimant] = tuple(ranges)
            text = json.dumps(
                {name: [[one.space, str(one.network)] for one in its] for name, its in claims.items()}
            )
            try:
                self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                replace_file(self._path, text)
            except OSError as error:
                raise FailedPrecondition(f"{self._path} can't be written: {error}; see state_dir") from None

    def _thd_read(self) -> Mapping[str, Sequence[AddressRange]]:
        try:
            with self._path.open("rb") as file:
                found = json.loads(file.read(_MOST_BYTES))
            return {
                str(name): tuple(AddressRange(str(space), ip_network(network)) for space, network in its)
                for name, its in found.items()
            }
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, AttributeError) as error:
            _log.error("{path} can't be read, and is made anew: {error}", path=self._path, error=error)
            return {}


def _check(claimant: str, ranges: Sequence[AddressRange], other: str, its: Sequence[AddressRange]) -> None:
    for mine, theirs in _colliding(ranges, its):
        raise FailedPrecondition(
            f"pods of {claimant} would have addresses of {mine.network} (in {mine.space}), and those of "
            f"{other} have addresses of {theirs.network} (in {theirs.space}): the node can't tell them "
            "apart, nor reach both. Give one of them a network with other addresses, or have its pods' "
            f"addresses be floating ones (pod_address), or take {claimant} to another node"
        )


def _colliding(
    ranges: Sequence[AddressRange], others: Sequence[AddressRange]
) -> Iterator[tuple[AddressRange, AddressRange]]:
    return ((mine, theirs) for mine in ranges for theirs in others if mine.collides(theirs))
