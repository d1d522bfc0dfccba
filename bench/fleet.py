# SPDX-License-Identifier: Apache-2.0
"""10,000 Services for 1, 100 and 1,000 VMs of one node: first tables, changes, memory, processor time, bytes.

This process does what the daemon does for Services: it follows the API server and keeps each VM's rules up to
date, with the agent's client over TLS. The API server and the VMs are in another process (`fleet_vms`), whose
work is counted only in the load of the machine.
"""

from __future__ import annotations

import contextlib
import gc
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from twisted.internet.threads import deferToThread

from bench import fleet_vms
from bench.figures import Missing, Report
from bench.turns import Turns
from infranetes.identity.authority import Authority
from infranetes.kubernetes.api_server import ApiServer
from infranetes.machines.agent.client import connector
from infranetes.service import GC_THRESHOLDS
from infranetes.services.cluster import ClusterServices
from infranetes.services.sender import RuleSender
from infranetes_common.concurrency import sleep
from infranetes_common.reactors import IReactor

SERVICES, REAL = 10_000, 3
VMS = {1: 50.0, 100: 250.0, 1000: None}  # with the target of a change's p99, in milliseconds
CHANGES, EVERY = 100, 0.1
STARTS_SECONDS = 0.005  # between the VMs' connections
MIB = 1 << 20
KUBECONFIG = """\
current-context: here
contexts: [{name: here, context: {cluster: it, user: me}}]
clusters: [{name: it, cluster: {server: "%s"}}]
users: [{name: me, user: {}}]
"""


async def run(reactor: IReactor, report: Report, services: int = SERVICES) -> None:
    gc.collect()  # as the daemon does when it starts
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    with tempfile.TemporaryDirectory() as path, contextlib.ExitStack() as stack:
        directory = Path(path)
        authority = Authority(directory)
        command = [sys.executable, "-m", "bench.fleet_vms", path, str(services), str(REAL)]
        other = stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        assert other.stdin is not None and other.stdout is not None
        stack.callback(other.stdin.close)
        told = await deferToThread(other.stdout.readline)
        if not told:
            raise Missing("the other side could not start; it says why above")
        there = json.loads(told)
        kubeconfig = directory / "kubeconfig"
        kubeconfig.write_text(KUBECONFIG % there["api"])
        node = Node(reactor, report, authority, kubeconfig, there["port"])
        stack.callback(node.stop)
        await node.follow(services)
        first = 0
        for vms, target in VMS.items():
            await node.have(vms)
            with node.watched(vms):
                other.stdin.write(f"{first} {CHANGES} {EVERY}\n".encode())
                other.stdin.flush()
                seconds = json.loads(await deferToThread(other.stdout.readline))
            first += CHANGES
            _tell(report, vms, seconds, target)


class Node:
    """The daemon's part."""

    def __init__(
        self, reactor: IReactor, report: Report, authority: Authority, kubeconfig: Path, port: int
    ) -> None:
        self._reactor, self._report, self._port = reactor, report, port
        self._connect = connector(reactor, authority)
        self._before = _resident()
        self._cluster = ClusterServices(reactor, ApiServer(reactor, kubeconfig), "here")
        self._senders: list[RuleSender] = []
        self._turns = Turns(reactor)

    def stop(self) -> None:
        for sender in self._senders:
            sender.stop()
        self._cluster.stopService()

    def _add(self, name: str, value: float, unit: str, target: float | None = None) -> None:
        self._report.add("fleet", name, value, unit, target)

    def _turned(self, what: str, turns: Turns) -> None:
        self._add(f"{what}: the daemon's longest turn, but for garbage", turns.longest * 1000, "ms", 50)
        self._add(f"{what}: its longest collection of garbage", turns.collection * 1000, "ms")

    async def follow(self, services: int) -> None:
        began = time.monotonic()
        with self._turns as turns:
            self._cluster.startService()
            while not (self._cluster.complete and self._cluster.table.count == services):
                await sleep(self._reactor, 0.05)
        what = f"the daemon follows {services:,} Services of {fleet_vms.ENDPOINTS} endpoints"
        self._add(f"{what}: until it has them", time.monotonic() - began, "s")
        self._add(f"{what}: its memory for them", (_resident() - self._before) / MIB, "MiB")
        self._turned(what, turns)

    async def have(self, vms: int) -> None:
        """Connect VMs until there are `vms`, and wait until each has all rules."""
        began, used, sent, memory = time.monotonic(), _processor(), _sent(), _resident()
        new = vms - len(self._senders)
        with self._turns as turns:
            for _ in range(new):
                agent = self._connect(fleet_vms.SANDBOX, "127.0.0.1", self._port)
                sender = self._cluster.sender(agent)
                self._senders.append(sender)
                sender.start()
                await sleep(self._reactor, STARTS_SECONDS)
            while any(each.number < 0 for each in self._senders):
                await sleep(self._reactor, 0.02)
        what = f"{new:,} VMs more" if new > 1 else "one VM"
        self._add(f"{what}: until they have all rules", time.monotonic() - began, "s")
        self._add(f"{what}: the daemon's processor time", _processor() - used, "s")
        self._add(f"{what}: the daemon's memory for them", (_resident() - memory) / MIB, "MiB")
        self._add(f"{what}: bytes for each", (_sent() - sent) / new / 1e6, "MB")
        self._turned(what, turns)

    @contextlib.contextmanager
    def watched(self, vms: int) -> Iterator[None]:
        """Record what the changes cost that are made inside this context."""
        began, used, sent = time.monotonic(), _processor(), _sent()
        with self._turns as turns:
            yield
        took = time.monotonic() - began
        what = f"{vms:,} VMs, {1 / EVERY:.0f} changes a second"
        self._add(f"{what}: the daemon's processor", (_processor() - used) / took * 100, "%")
        self._add(f"{what}: bytes per VM and hour", (_sent() - sent) / vms / took * 3600 / 1e6, "MB")
        self._turned(what, turns)


def _tell(report: Report, vms: int, seconds: dict[str, float], target: float | None) -> None:
    if seconds["lost"]:
        raise AssertionError(f"{seconds['lost']} changes have not come to {vms} VMs")
    what = f"{vms:,} VMs: one Service's change until it is in force"
    report.add("fleet", what, seconds["all 50"], "ms", percent=50)
    report.add("fleet", what, seconds["all 99"], "ms", target, percent=99)
    if vms > REAL:
        by_nft = f"{what}: by nft, in {REAL} of them"
        report.add("fleet", by_nft, seconds["real 99"], "ms", target, percent=99)


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _processor() -> float:
    return time.process_time()


def _sent() -> int:
    """Return how many bytes have passed through the loopback interface, including the API server's events."""
    with Path("/proc/net/dev").open() as lines:
        return next((int(line.split()[9]) for line in lines if line.strip().startswith("lo:")), 0)
