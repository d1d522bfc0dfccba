# SPDX-License-Identifier: Apache-2.0
"""kube-proxy in nftables mode and a VM's own rules: the same Services from the same simulated API server.

Each has network namespaces of its own: one for a pod that sends and one for all endpoints; kube-proxy is in a
third one between them, where its node would be. It may change the kernel's tables every 10 ms rather than
once a second, the default. Times end with the first packet that arrives where it should.
"""

from __future__ import annotations

import contextlib
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from ipaddress import IPv4Address
from pathlib import Path

from bench.figures import Missing, Report
from infranetes_common.concurrency import run_in_thread
from infranetes_common.reactors import IReactor
from tests.cluster.kube_proxy import SLICES, Both
from tests.cluster.paths import PROGRAMS
from tests.cluster.service_worlds import Json, World
from tests.cluster.ways import Destination, Way
from tests.infranetes.services import objects as written

SERVICES, ENDPOINTS = 10_000, 5
CHANGES, CONNECTIONS = 10, 2000
LONGEST = 600.0  # seconds until all Services must be in force
NAMES = ("in a VM", "kube-proxy")


async def run(reactor: IReactor, report: Report, services: int = SERVICES) -> None:
    if not (PROGRAMS / "kube-proxy").exists():
        raise Missing(f"{PROGRAMS / 'kube-proxy'} is missing: make cluster-tools")
    with tempfile.TemporaryDirectory() as directory:
        both = Both(reactor, Path(directory))
        await both.prepare()
        try:
            both.put(_world(services))
            for name, way, begin in zip(
                NAMES, (both.own_way, both.node_way), (both.start_own, both.start_kube_proxy), strict=True
            ):
                began = time.perf_counter()
                begin()
                work = partial(_thd_measure, reactor, report, both, way, name, services, began)
                await run_in_thread(reactor, work)
                if way is both.own_way:
                    both.stop_own()
        finally:
            await both.end()


def _thd_measure(
    reactor: IReactor, report: Report, both: Both, way: Way, name: str, services: int, began: float
) -> None:
    what = f"{services:,} Services of {ENDPOINTS} endpoints"
    last, first = (Destination(str(_address(number)), "TCP", 80) for number in (services - 1, 0))
    with _watching_nft() as peak:
        _thd_until(way, last, lambda found: found != f"{last.address}:80")
    seconds_taken = time.perf_counter() - began
    report.add("proxies", f"{what}: from its start until they are in force", seconds_taken, "s", whose=name)
    report.add("proxies", f"{what}: the most memory of one nft", peak() / 1024, "MiB", whose=name)
    if way is both.node_way:
        report.add(
            "proxies", f"{what}: its memory", _high_water(both.kube_proxy.pid) / 1024, "MiB", whose=name
        )
    seconds = []
    for change in range(CHANGES):
        address = f"10.200.{change}.1"
        item = written.endpoint_slice(written.endpoint(address), service="s0", name="s0-1")
        changed = time.perf_counter()
        reactor.callFromThread(both.server.put, SLICES, item)
        _thd_until(way, first, lambda found: found == f"{address}:8080")  # noqa: B023
        seconds.append(time.perf_counter() - changed)
    change_label = f"{what}: one Service's change until it is in force"
    report.latencies("proxies", change_label, seconds, (50, 100), whose=name)
    direct, through = (
        way.pod.inside(partial(_connect, *each)) for each in (("10.250.0.1", 80), (first.address, 80))
    )
    report.latencies("proxies", f"{what}: a connection to an endpoint", direct, (50, 99), whose=name)
    report.latencies("proxies", f"{what}: a connection through a Service", through, (50, 99), whose=name)


def _thd_until(way: Way, destination: Destination, holds: Callable[[str], bool]) -> None:
    """Connect again and again until the endpoint that answers is the right one."""
    until = time.monotonic() + LONGEST
    while not holds(way.reached([destination])[0]):
        if time.monotonic() > until:
            raise TimeoutError(f"{destination} is not served in {LONGEST:.0f} s")
        time.sleep(0.001)


def _world(services: int) -> World:
    made: list[Json] = []
    slices: list[Json] = []
    for number in range(services):
        name, first = f"s{number}", IPv4Address("10.2.0.0") + number * 16
        made.append(written.service(name, (str(_address(number)),), ipFamilies=["IPv4"]))
        endpoints = [written.endpoint(str(first + each)) for each in range(ENDPOINTS)]
        slices.append(written.endpoint_slice(*endpoints, service=name))
    return World(made, slices)


def _address(number: int) -> IPv4Address:
    return IPv4Address("10.97.0.1") + number


def _connect(address: str, port: int) -> Sequence[float]:
    """Return the seconds that it takes to establish each of several connections."""
    found = []
    for _ in range(CONNECTIONS):
        began = time.perf_counter()
        with socket.create_connection((address, port), 5) as connection:
            found.append(time.perf_counter() - began)
            connection.recv(100)
    return found


@contextlib.contextmanager
def _watching_nft() -> Iterator[Callable[[], int]]:
    """Watch processes called nft. Yields a function for the most memory that one of them has had, in KiB."""
    seen = [0]
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.01):
            for path in (each / "comm" for each in Path("/proc").glob("[0-9]*")):
                with contextlib.suppress(OSError):
                    if path.read_text() == "nft\n":
                        seen.append(_high_water(int(path.parent.name)))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield lambda: max(seen)
    finally:
        over.set()
        thread.join()


def _high_water(pid: int) -> int:
    """Return the most memory that a process has had, in KiB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)
