# SPDX-License-Identifier: Apache-2.0
"""Services in a VM: the first table, a change, and the cost of a connection through a Service.

Measured with the daemon's table and the agent's service proxy in one process, without emulation, in a network
namespace of its own.
"""

from __future__ import annotations

import resource
import socket
import time
from collections.abc import Sequence
from ipaddress import IPv4Address
from pathlib import Path

from bench.figures import Report
from infranetes.kubernetes.fields import Name
from infranetes.services.messages import updates
from infranetes.services.objects import Endpoint, EndpointPort, EndpointSlice, OwnNode, Service, ServicePort
from infranetes.services.table import RuleTable
from infranetes_common.reactors import IReactor
from infranetes_common.service_proxy.kernel import Kernel
from infranetes_common.service_proxy.messages import as_update
from infranetes_common.service_proxy.proxy import ServiceProxy
from tests.infranetes_common.service_proxy.namespace import Namespace

SERVICES, ENDPOINTS = 10_000, 5
CHANGES, CONNECTIONS = 100, 2000
SERVED = IPv4Address("10.1.0.1")  # the address, in the namespace, of each endpoint of the first Service
MIB = 1 << 20


async def run(reactor: IReactor, report: Report) -> None:
    space = Namespace()
    try:
        space.serve(str(SERVED), 8080)
        direct = space.inside(lambda: _connect(str(SERVED), 8080))
        table = RuleTable(OwnNode("here"))
        for number in range(SERVICES):
            _put(table, number)
        before = _resident()
        proxy = ServiceProxy(Kernel(reactor, space.name))
        number = await _told(report, table, proxy)
        what = f"{SERVICES:,} Services of {ENDPOINTS} endpoints"
        report.add("services", f"{what}: the agent's memory", (_resident() - before) / MIB, "MiB", 20)
        seconds = []
        for change in range(CHANGES):
            _put(table, change + 1, shift=1)
            began = time.perf_counter()
            for update in updates(table, number):
                await proxy.apply(as_update(update))
            number = table.number
            seconds.append(time.perf_counter() - began)
        report.latencies("services", "one Service's change until it is in force", seconds, (50, 99), {99: 50})
        through = space.inside(lambda: _connect(str(_address(0)), 80))
        report.latencies("services", "a connection without a Service", direct, (50, 99))
        report.latencies("services", "a connection through one of them", through, (50, 99))
    finally:
        space.end()


async def _told(report: Report, table: RuleTable, proxy: ServiceProxy) -> int:
    """Load the whole table into the kernel. Return the table's number."""
    began, size = time.perf_counter(), 0
    for update in updates(table, None):
        size += update.ByteSize()
        await proxy.apply(as_update(update))
    seconds = time.perf_counter() - began
    what = f"{SERVICES:,} Services of {ENDPOINTS} endpoints"
    report.add("services", f"{what}: until a VM has them", seconds, "s", 1.0)
    report.add("services", f"{what}: what is sent", size / 1e6, "MB")
    return table.number


def _put(table: RuleTable, number: int, shift: int = 0) -> None:
    name = Name("ns", f"s{number}")
    first = SERVED if not number else IPv4Address("10.2.0.0") + number * 16 + shift
    endpoints = tuple(Endpoint(first + each * bool(number)) for each in range(ENDPOINTS))
    ports = (EndpointPort("", "TCP", 8080),)
    table.put_service(Service(name, (_address(number),), (ServicePort("", "TCP", 80),)))
    table.put_slice(EndpointSlice(Name("ns", f"s{number}-1"), name, ports, endpoints))


def _address(number: int) -> IPv4Address:
    return IPv4Address("10.96.0.1") + number


def _connect(address: str, port: int) -> Sequence[float]:
    """Return the seconds that it takes to establish each of several connections."""
    found = []
    for _ in range(CONNECTIONS):
        began = time.perf_counter()
        connection = socket.create_connection((address, port), 5)
        found.append(time.perf_counter() - began)
        connection.recv(100)
        connection.close()
    return found


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
