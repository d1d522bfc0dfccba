# SPDX-License-Identifier: Apache-2.0
"""The cost of importing and calling libraries that are not used, beside the cost of what is used instead.

Each part runs in a process of its own (`bench.library_calls`), those about netlink in a network namespace.
docs/dependencies-measured.md draws the conclusions.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec

import attrs
from twisted.internet.threads import deferToThread

from bench import txgrpc
from bench.figures import Missing, Report, say
from bench.library_calls import NFTABLES, Found
from infranetes_common.reactors import IReactor
from tests.infranetes_common.service_proxy.namespace import Namespace
from tests.support import oci
from tests.support.dockerd import Dockerd, archive

ROUNDS = 3
SECONDS = 300.0
AT_ONCE = 8
IN_FLIGHT = 32
EMULATOR = "qemu-x86_64-static"

AGENT = ("vmserver.daemon", "infranetes_common.nftables")
DAEMON = ("infranetes.service", "infranetes.daemon.assembly", "infranetes.providers.qemu.network.bridge")


@attrs.frozen
class Import:
    """A module to import, and the modules that a process which uses it has loaded anyway."""

    module: str
    whose: str
    beside: Sequence[str] = ()


@attrs.frozen
class Call:
    """One way to do something. :ivar whose: the library, or what is used instead of it."""

    name: str
    whose: str
    part: str
    arguments: Sequence[str] = ()


OURS = "ours"
IMPORTS = (
    Import("docker", "docker"),
    Import("vmserver.containers.docker.engine", OURS),
    Import("docker", "docker, in the agent", AGENT),
    Import("vmserver.containers.docker.engine", "ours, in the agent", AGENT),
    Import("grpclib.server", "grpclib"),
    Import("txgrpc", OURS),
    Import("nftables", "python3-nftables"),
    Import("infranetes_common.nftables", OURS),
    Import("nftables", "python3-nftables, in the agent", AGENT),
    Import("pyroute2", "pyroute2"),
    Import("pyroute2", "pyroute2, in the daemon", DAEMON),
)
NETLINK = (
    Call("two changes of a map of rules", "python3-nftables", "rules_by_python3_nftables"),
    Call("two changes of a map of rules", "ours: libnftables by ctypes", "rules_by_ours"),
    Call("two changes of a map of rules", "two programs nft", "rules_by_program"),
    Call("an address added and removed", "pyroute2", "addresses_by_pyroute2"),
    Call("an address added and removed", "two programs ip", "addresses_by_program"),
    Call("an address added and removed", "ours: one program ip, with -batch", "addresses_by_batch"),
    Call("a tap made and removed", "pyroute2", "taps_by_pyroute2"),
    Call("a tap made and removed", "two programs ip", "taps_by_program"),
    Call("a tap made and removed", "ours: a descriptor of /dev/net/tun", "taps_by_ours"),
)
EXTRA = ("docker", "grpclib", "pyroute2")


async def run(reactor: IReactor, report: Report, variant: str = "") -> None:
    """:param variant: `emulated`: only the imports and Docker's calls, in QEMU's user-mode emulation."""
    lacking = [name for name in EXTRA if find_spec(name) is None]
    if lacking:
        raise Missing(f"{', '.join(lacking)}: pip install '.[bench]'")
    if not NFTABLES.exists():
        raise Missing("python3-nftables is missing: apt-get install python3-nftables")
    if variant and shutil.which(EMULATOR) is None:
        raise Missing(f"{EMULATOR} is missing: apt-get install qemu-user-static")
    await deferToThread(_thd_run, report, bool(variant))


def _thd_run(report: Report, emulated: bool) -> None:
    how = ", emulated" if emulated else ""
    for each in IMPORTS:
        if emulated and each.beside:
            continue
        found = _measured(("imports", each.module, *each.beside), emulated=emulated)
        name = f"import of {each.module}{how}"
        report.add("libraries", name, found["processor_ms"], "ms", note="of a processor", whose=each.whose)
        report.add("libraries", f"{name}: memory", found["mib"], "MiB", whose=each.whose)
        report.add("libraries", f"{name}: modules", found["modules"], "", whose=each.whose)
    _docker(report, how, emulated)
    if emulated:  # QEMU's user-mode emulation supports neither nftables' netlink nor other processes
        return
    with _namespace() as inside:
        for call in NETLINK:
            _tell(report, call, _measured((call.part, *call.arguments), inside))
    _grpc(report)


def _docker(report: Report, how: str, emulated: bool) -> None:
    engine = Dockerd().start()
    try:
        container = _container(engine)
        inspect = f"an inspection of a container of Docker's{how}"
        at_once = f"the same, {AT_ONCE} at a time{how}"
        socket = (str(engine.socket), container)
        calls = [
            Call(inspect, "docker", "docker_by_sdk", socket),
            Call(inspect, OURS, "docker_by_ours", (*socket, "1")),
        ]
        if not emulated:  # there, threads are hardly scheduled
            calls += [
                Call(at_once, f"docker, in {AT_ONCE} threads", "docker_by_threads", (*socket, str(AT_ONCE))),
                Call(at_once, OURS, "docker_by_ours", (*socket, str(AT_ONCE))),
            ]
        for call in calls:
            _tell(report, call, _measured((call.part, *call.arguments), emulated=emulated))
    finally:
        engine.stop()


def _container(engine: Dockerd) -> str:
    """Make a container that is never started, and return its name."""
    import docker

    client = docker.APIClient(f"unix://{engine.socket}", version="1.41")
    image = oci.busybox()
    client.load_image(archive(image))
    return str(client.create_container(image.id, ["true"], name="bench")["Id"])


def _grpc(report: Report) -> None:
    note = f"unary, {IN_FLIGHT} in flight, grpcio's client"
    servers = ("txgrpc", "grpclib")
    found = txgrpc.run(in_flight=IN_FLIGHT, rounds=ROUNDS, servers=servers)
    for name in servers:
        whose = "ours: txgrpc" if name == "txgrpc" else name
        values = found[name]
        report.add("libraries", "gRPC calls", values["calls_per_second"], "calls/s", note=note, whose=whose)
        milliseconds = values["processor_us"] / 1000
        report.add("libraries", "a gRPC call: the server's processor", milliseconds, "ms", whose=whose)
        memory = found["resident"][f"{name}_server_bytes"] / 2**20
        report.add("libraries", "the gRPC server, resident", memory, "MiB", whose=whose)


def _tell(report: Report, call: Call, found: Found) -> None:
    report.add("libraries", call.name, found["ms"], "ms", whose=call.whose, percent=50)
    report.add("libraries", f"{call.name}: processor", found["processor_ms"], "ms", whose=call.whose)


def _measured(part: Sequence[str], prefix: Sequence[str] = (), emulated: bool = False) -> Found:
    """Return the medians over several processes that run the same part."""
    before = [EMULATOR] if emulated else []
    command = [*prefix, *before, sys.executable, "-m", "bench.library_calls", *part]
    found = []
    for _ in range(1 if emulated else ROUNDS):
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=SECONDS)
        found.append(json.loads(done.stdout))
    return {key: statistics.median(each[key] for each in found) for key in found[0]}


@contextmanager
def _namespace() -> Iterator[Sequence[str]]:
    """Make a network namespace. Yields the command prefix that runs a program in it."""
    space = Namespace(())
    say(f"  in the network namespace {space.name}")
    try:
        yield ("ip", "netns", "exec", space.name)
    finally:
        space.end()
