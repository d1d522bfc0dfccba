# SPDX-License-Identifier: Apache-2.0
"""What `bench.libraries` measures, each part in a process of its own:

    python -m bench.library_calls PART [ARGUMENT...]

prints JSON. All the calls block, except those of our own client of Docker, which has a reactor.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

#: The module of Debian's python3-nftables, which PyPI lacks. Nothing else beside it may be imported.
NFTABLES = Path("/usr/lib/python3/dist-packages/nftables/__init__.py")
CALLS, PROGRAMS = 500, 100  # how many calls of a library, and how many runs of a program, which are slower
WARM_UP = 5
Found = dict[str, float]


def imports(module: str, *before: str) -> Found:
    """Measure the import of a module after those in `before` have been loaded."""
    for each in before:
        importlib.import_module(each)
    resident, known, used = _resident(), len(sys.modules), _processor()
    _nftables() if module == "nftables" else importlib.import_module(module)
    return {
        "processor_ms": (_processor() - used) * 1000,
        "mib": (_resident() - resident) / 2**20,
        "modules": len(sys.modules) - known,
    }


def docker_by_sdk(socket: str, container: str) -> Found:
    """Docker's own library, one call after the other."""
    import docker

    client = docker.APIClient(f"unix://{socket}", version="1.41")
    return _repeated(lambda: client.inspect_container(container))


def docker_by_threads(socket: str, container: str, at_once: str) -> Found:
    """Docker's own library in `at_once` threads, each with a client of its own: a client has a pool of
    connections, but is not documented to be thread-safe."""
    from concurrent.futures import ThreadPoolExecutor
    from threading import local

    import docker

    clients = local()

    def call(_: int) -> None:
        if not hasattr(clients, "client"):
            clients.client = docker.APIClient(f"unix://{socket}", version="1.41")
        clients.client.inspect_container(container)

    with ThreadPoolExecutor(int(at_once)) as pool:
        list(pool.map(call, range(int(at_once) * WARM_UP)))
        begun = _Begun()
        list(pool.map(call, range(CALLS)))
        return begun.found(CALLS)


def docker_by_ours(socket: str, container: str, at_once: str) -> Found:
    """`vmserver.containers.docker.engine`, with `at_once` calls at a time."""
    from twisted.internet.task import react

    from bench.client import side_by_side
    from infranetes_common.concurrency import start
    from infranetes_common.reactors import IReactor
    from vmserver.containers.docker.engine import Engine

    found: Found = {}

    async def measured(reactor: IReactor) -> None:
        engine = Engine(reactor, Path(socket))

        async def one(_: int) -> float:
            await engine.inspect_container(container)
            return 0.0

        await side_by_side(int(at_once) * WARM_UP, int(at_once), one)
        begun = _Begun()
        await side_by_side(CALLS, int(at_once), one)
        found.update(begun.found(CALLS))
        await engine.close()

    try:
        react(lambda reactor: start(measured(reactor)))
    except SystemExit as ended:
        if ended.code:
            raise
    return found


def rules_by_python3_nftables() -> Found:
    """libnftables through the Python module of nftables' own authors."""
    tables = _nftables().Nftables()

    def run(script: str) -> None:
        failed, _, why = tables.cmd(script)
        if failed:
            raise RuntimeError(why)

    return _rules(run, CALLS)


def rules_by_ours() -> Found:
    """libnftables through `infranetes_common.nftables`."""
    from infranetes_common.nftables import Library

    return _rules(Library().thd_run, CALLS)


def rules_by_program() -> Found:
    """The program nft, run once for each change."""

    def run(script: str) -> None:
        subprocess.run(["nft", "-f", "-"], input=script.encode(), check=True)

    return _rules(run, PROGRAMS)


def addresses_by_pyroute2() -> Found:
    """Add an address and delete it, with pyroute2."""
    from pyroute2 import IPRoute

    with IPRoute() as links:
        (index,) = links.link_lookup(ifname="lo")

        def both() -> None:
            links.addr("add", index=index, address="10.9.0.1", prefixlen=32)
            links.addr("del", index=index, address="10.9.0.1", prefixlen=32)

        return _repeated(both)


def addresses_by_program() -> Found:
    """The same with the program ip, run once for each of the two."""

    def both() -> None:
        for what in ("add", "del"):
            subprocess.run(["ip", "address", what, "10.9.0.1/32", "dev", "lo"], check=True)

    return _repeated(both, PROGRAMS)


def addresses_by_batch() -> Found:
    """The same with one run of ip for both."""
    lines = b"address add 10.9.0.1/32 dev lo\naddress del 10.9.0.1/32 dev lo\n"
    return _repeated(lambda: _ip_batch(lines), PROGRAMS)


def taps_by_pyroute2() -> Found:
    """Create a tap and delete it, with pyroute2."""
    from pyroute2 import IPRoute

    with IPRoute() as links:

        def both() -> None:
            links.link("add", ifname="benchtap", kind="tuntap", mode="tap")
            links.link("del", ifname="benchtap")

        return _repeated(both, PROGRAMS)


def taps_by_program() -> Found:
    """The same with the program ip, run once for each of the two."""

    def both() -> None:
        for what in ("add", "del"):
            subprocess.run(["ip", "tuntap", what, "benchtap", "mode", "tap"], check=True)

    return _repeated(both, PROGRAMS)


def taps_by_ours() -> Found:
    """The same with the file descriptor that `infranetes.providers.qemu.network.bridge` passes to QEMU."""
    from infranetes.providers.qemu.network.bridge import open_tap

    return _repeated(lambda: os.close(open_tap("benchtap")), PROGRAMS)


PARTS: dict[str, Callable[..., Found]] = {
    part.__name__: part
    for part in (
        imports,
        docker_by_sdk,
        docker_by_threads,
        docker_by_ours,
        rules_by_python3_nftables,
        rules_by_ours,
        rules_by_program,
        addresses_by_pyroute2,
        addresses_by_program,
        addresses_by_batch,
        taps_by_pyroute2,
        taps_by_program,
        taps_by_ours,
    )
}


class _Begun:
    """The time at which calls began."""

    def __init__(self) -> None:
        self._wall, self._processor = time.perf_counter(), _processor()

    def found(self, calls: int) -> Found:
        """Return what each call has taken since then, in milliseconds; processor time includes children's."""
        wall, processor = time.perf_counter() - self._wall, _processor() - self._processor
        return {"ms": wall / calls * 1000, "processor_ms": processor / calls * 1000, "a_second": calls / wall}


def _repeated(call: Callable[[], object], calls: int = CALLS) -> Found:
    for _ in range(WARM_UP):
        call()
    begun = _Begun()
    for _ in range(calls):
        call()
    return begun.found(calls)


def _rules(run: Callable[[str], None], calls: int) -> Found:
    """Make two changes to a map, like those that a change of a Service's endpoints makes."""
    run("add table ip bench; add map ip bench services { type ipv4_addr . inet_service : verdict; }")
    run("add chain ip bench one")

    def both() -> None:
        for what in ("add", "delete"):
            run(f"{what} element ip bench services {{ 10.9.0.1 . 80 : goto one }}\n")

    return _repeated(both, calls)


def _nftables() -> ModuleType:
    spec = spec_from_file_location("nftables", NFTABLES, submodule_search_locations=[str(NFTABLES.parent)])
    assert spec is not None and spec.loader is not None
    module = sys.modules["nftables"] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _ip_batch(lines: bytes) -> None:
    subprocess.run(["ip", "-batch", "-"], input=lines, check=True)


def _processor() -> float:
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    print(json.dumps(PARTS[sys.argv[1]](*sys.argv[2:])))
