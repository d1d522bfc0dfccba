# SPDX-License-Identifier: Apache-2.0
"""How much of an account's quotas up to 1,000 nodes with 30 pods each use, and how soon they notice ends.

One node is simulated in virtual time, with the daemon's passes: an hour at rest, an hour in which a tenth of
its pods are replaced, and an hour of pods without our agent, whose ends nobody tells. Its requests are
multiplied, and they are replayed for each of many nodes at random offsets, against the buckets and quotas
that the vendors document. The target is half of each.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import attrs

from bench import accounts
from bench.accounts import HOUR, Request
from bench.calls import SETTLE_SECONDS, Count, for_each_cloud
from bench.figures import Report
from infranetes.providers.interface import Instance
from infranetes_common.reactors import IReactor
from tests.support.virtual_time import VirtualTime

PODS = 30
NODES = (10, 100, 1000)
CHURN = PODS // 10  # pods that are replaced in an hour
HALF = 50.0  # percent
END_SECONDS = 60.0
# When a VM's agent's connection breaks: at once where it is shut down, or once nobody answers a PING.
BREAKS = {"is shut down": 1.0, "vanishes": 40.0}
LONGEST = 600.0


async def run(reactor: IReactor, report: Report) -> None:
    await for_each_cloud(reactor, report, "quota", NodeHours, _measure)


async def _measure(node: NodeHours, name: str, report: Report) -> None:
    await node.begin()
    await node.launch(PODS)
    _tell(report, name, "at rest", await node.resting())
    if name == "vsphere":
        share = 100.0 * node.sessions * NODES[-1] / accounts.VCENTER_SESSIONS
        report.add("quota", f"of vCenter's sessions, {NODES[-1]:,} nodes, at rest, {name}", share, "%", HALF)
    _tell(report, name, f"{CHURN} pods an hour replaced", await node.replacing(CHURN))
    for how, seconds in BREAKS.items():
        noticed = await node.noticing(seconds)
        report.add(
            "quota", f"the end of a VM that {how}, until it is noticed, {name}", noticed, "s", END_SECONDS
        )
    node.silence()
    _tell(report, name, "at rest, no pod with our agent", await node.resting(), target=False)


def _tell(report: Report, name: str, when: str, requests: Sequence[Request], target: bool = True) -> None:
    made = Counter(request.parameters["Action"] for request in requests)
    what = ", ".join(f"{count} {action}" for action, count in made.most_common())
    report.add("quota", f"a node's hour {when}, {name}", len(requests), "calls", note=what)
    for nodes in NODES:
        used = accounts.uses(name, requests, 1.0, nodes)
        if not used:
            continue
        note = ", ".join(f"{use.calls:,.0f} of {use.most:,.0f} {use.quota}" for use in used)
        goal = HALF if target else None
        words = f"of the account's scarcest quota, {nodes:,} nodes, {when}, {name}"
        report.add("quota", words, used[0].percent, "%", goal, note)
    chance = random.Random(NODES[-1])  # noqa: S311
    refused = accounts.replay(name, shifted(requests, NODES[-1], chance))
    report.add("quota", f"refused at first, {NODES[-1]:,} nodes, {when}, {name}", refused, "calls")


def shifted(requests: Sequence[Request], nodes: int, chance: random.Random) -> list[list[Request]]:
    """Return the requests of nodes that do the same, each at another time of the hour."""
    return [_shifted(requests, f"node-{number}", chance.uniform(0.0, HOUR)) for number in range(nodes)]


def _shifted(requests: Sequence[Request], node: str, offset: float) -> list[Request]:
    """Return the requests of a node, whose VMs have other names than those of others."""
    moved = []
    for each in requests:
        parameters = dict(each.parameters)
        if "name" in parameters:
            parameters["name"] = f"{node}-{parameters['name']}"
        moved.append(Request((each.at + offset) % HOUR, parameters))
    return sorted(moved, key=lambda request: request.at)


class NodeHours(Count):
    """The hours of one node."""

    def __init__(self, time: VirtualTime, name: str, directory: Path) -> None:
        super().__init__(time, name, directory, PODS + CHURN + len(BREAKS))
        self._ids: list[str] = []
        self._ended: dict[str, float] = {}
        self._trace: list[Request] = []
        self.world.requests = _Timed(self._trace, time)
        self._provider.watch(self._note_end)

    def _note_end(self, instance: Instance) -> None:
        self._ended[instance.id] = self._time.seconds()

    async def launch(self, pods: int) -> None:
        """Launch pods, and wait until what follows from that is over."""
        for _ in range(pods):
            await self._another()
        await self._sweeping(SETTLE_SECONDS)

    async def _another(self) -> None:
        id = await self._running()
        self._provider.agent_heard(id, True)
        self._ids.append(id)

    async def resting(self) -> list[Request]:
        """Return the requests of an hour in which nothing happens."""
        began = self._begin_hour()
        await self._sweeping(HOUR)
        return self._end_hour(began)

    async def replacing(self, pods: int) -> list[Request]:
        """Return the requests of an hour in which so many pods end and others begin."""
        began = self._begin_hour()
        for _ in range(pods):
            await self._passing(self._provider.destroy(self._ids.pop(0)))
            await self._another()
            await self._sweeping(max(HOUR / pods - (self._time.seconds() - began) % (HOUR / pods), 0.0))
        return self._end_hour(began)

    async def noticing(self, seconds: float) -> float:
        """End a VM from outside. Return how long that goes unnoticed.

        :param seconds: after which its agent's connection breaks."""
        id = self._ids.pop(0)
        began = self._time.seconds()
        self.world.end(id)
        await self._time.after(seconds, self._pools())
        self._provider.agent_heard(id, False)
        await self._time.until(
            lambda: id in self._ended or self._time.seconds() - began > LONGEST, self._pools()
        )
        noticed = self._ended.get(id, began + LONGEST) - began
        await self._passing(self._provider.destroy(id))
        await self._another()
        await self._sweeping(SETTLE_SECONDS)
        return noticed

    def silence(self) -> None:
        """Have the provider take its VMs for ones without our agent."""
        self._provider._watcher._is_agentless = lambda vm: True

    @property
    def sessions(self) -> int:
        """How many sessions the node has with the cloud."""
        return len(self._provider._calls._drivers)

    def _begin_hour(self) -> float:
        self._trace.clear()
        return self._time.seconds()

    def _end_hour(self, began: float) -> list[Request]:
        return [attrs.evolve(each, at=each.at - began) for each in self._trace if each.at - began < HOUR]


class _Timed(list[dict[str, str]]):
    """A list of requests that also notes when they were made."""

    def __init__(self, trace: list[Request], time: VirtualTime) -> None:
        super().__init__()
        self._trace = trace
        self._time = time

    def append(self, parameters: dict[str, str]) -> None:
        super().append(parameters)
        self._trace.append(Request(self._time.seconds(), dict(parameters)))
