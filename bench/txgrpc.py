# SPDX-License-Identifier: Apache-2.0
"""txgrpc against grpcio's asyncio server: unary calls on a unix socket, the same client, one run.

    python bench/txgrpc.py [--seconds 4] [--in-flight 32] [--rounds 3] [--json PATH]

Each server runs in a process of its own, and so does the client (grpcio's asyncio one). The servers take
turns, round by round, so that a change in the machine's load affects both. Also measured: the resident memory
that an idle connection costs a txgrpc server and a txgrpc client, in bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PATH = "/txgrpc.bench.Bench/Echo"
IDLE = 500
SERVERS = ("txgrpc", "grpcio")


def serve_txgrpc(socket: str) -> None:
    """Serve Echo with txgrpc, until killed."""
    from twisted.internet import reactor
    from twisted.internet.endpoints import UNIXServerEndpoint

    from txgrpc import Server, Service

    message, service = describe()

    class Bench:
        async def Echo(self, request: Any, call: Any) -> Any:
            return message(text=request.text)

    server = Server(reactor, [Service(service, Bench())])
    UNIXServerEndpoint(reactor, socket).listen(server.factory)
    loop: Any = reactor
    loop.run()


def serve_grpcio(socket: str) -> None:
    """Serve Echo with grpcio's asyncio server, until killed."""
    import asyncio

    import grpc

    message, _ = describe()

    async def echo(request: Any, context: Any) -> Any:
        return message(text=request.text)

    async def main() -> None:
        server = grpc.aio.server()
        handler = grpc.unary_unary_rpc_method_handler(
            echo, request_deserializer=message.FromString, response_serializer=message.SerializeToString
        )
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("txgrpc.bench.Bench", {"Echo": handler}),)
        )
        server.add_insecure_port(f"unix:{socket}")
        await server.start()
        await server.wait_for_termination()

    asyncio.run(main())


def serve_grpclib(socket: str) -> None:
    """Serve Echo with grpclib's asyncio server, until killed."""
    import asyncio

    from grpclib.const import Cardinality, Handler
    from grpclib.server import Server, Stream

    message, _ = describe()

    class Bench:
        async def echo(self, stream: Stream[Any, Any]) -> None:  # Any: classes made at run time
            request = await stream.recv_message()
            assert request is not None
            await stream.send_message(message(text=request.text))

        def __mapping__(self) -> dict[str, Handler]:
            return {PATH: Handler(self.echo, Cardinality.UNARY_UNARY, message, message)}

    async def main() -> None:
        server = Server([Bench()])
        await server.start(path=socket)
        await server.wait_closed()

    asyncio.run(main())


def client(socket: str, seconds: str, in_flight: str) -> None:
    """Make `in_flight` calls at a time for so long. Print calls per second and the median in µs."""
    import asyncio

    import grpc

    message, _ = describe()
    taken: list[float] = []

    async def main() -> float:
        async with grpc.aio.insecure_channel(f"unix:{socket}") as channel:
            echo = channel.unary_unary(
                PATH, request_serializer=message.SerializeToString, response_deserializer=message.FromString
            )
            await echo(message(text="warm"), wait_for_ready=True, timeout=30)
            end = time.perf_counter() + float(seconds)

            async def worker() -> None:
                while (before := time.perf_counter()) < end:
                    await echo(message(text="hello world"), timeout=30)
                    taken.append(time.perf_counter() - before)

            began = time.perf_counter()
            await asyncio.gather(*(worker() for _ in range(int(in_flight))))
            return time.perf_counter() - began

    wall = asyncio.run(main())
    p50 = statistics.median(taken) * 1e6
    print(json.dumps({"calls_per_second": len(taken) / wall, "p50_us": p50, "calls": len(taken)}))


def idle(socket: str, count: str) -> None:
    """Connect `count` channels to the server at `socket` and wait for a line; print the bytes for each."""
    from twisted.internet import reactor
    from twisted.internet.defer import Deferred, gatherResults
    from twisted.internet.endpoints import UNIXClientEndpoint

    from txgrpc import Channel
    from txgrpc.client import Stub, Unary

    message, described = describe()

    class BenchStub(Stub):
        service = described
        Echo: Unary[Any, Any]  # Any: classes made at run time

    async def main() -> None:
        before = resident("self")
        channels = [Channel(reactor, UNIXClientEndpoint(reactor, socket)) for _ in range(int(count))]
        for start in range(0, len(channels), 25):  # a listening socket's backlog is 50
            batch = channels[start : start + 25]
            await gatherResults(
                [BenchStub(channel).Echo(message(text="hello"), timeout=None) for channel in batch]
            )
        print(json.dumps((resident("self") - before) // int(count)), flush=True)
        sys.stdin.readline()
        loop.stop()

    def fail(failure: Any) -> None:
        failure.printTraceback()
        loop.stop()

    loop: Any = reactor
    loop.callWhenRunning(lambda: Deferred.fromCoroutine(main()).addErrback(fail))
    loop.run()


def describe() -> tuple[Any, Any]:
    """Return a message class and a service with Echo, made at run time."""
    from google.protobuf import descriptor_pb2, descriptor_pool

    from txgrpc.service import message_class

    file = descriptor_pb2.FileDescriptorProto(name="bench.proto", package="txgrpc.bench", syntax="proto3")
    text = file.message_type.add(name="Text").field.add(name="text", number=1)
    text.type, text.label = text.TYPE_STRING, text.LABEL_OPTIONAL
    name = ".txgrpc.bench.Text"
    file.service.add(name="Bench").method.add(name="Echo", input_type=name, output_type=name)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    made = pool.FindFileByName("bench.proto")
    return message_class(made.message_types_by_name["Text"]), made.services_by_name["Bench"]


def resident(pid: int | str) -> int:
    """Return the resident memory of a process, in bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def processor_seconds(pid: int) -> float:
    """Return the processor time of a process; unlike elapsed time, it hardly depends on other processes."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _child(role: str, *arguments: str, **keywords: Any) -> Any:
    command = [sys.executable, __file__, "--role", role, *arguments]
    return subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, **keywords)


def _measure(server: Any, socket: str, seconds: float, in_flight: int) -> dict[str, float]:
    before = processor_seconds(server.pid)
    process = _child("client", socket, str(seconds), str(in_flight), stdout=subprocess.PIPE)
    output, _ = process.communicate(timeout=seconds + 60)
    figures: dict[str, float] = json.loads(output)
    figures["processor_us"] = (processor_seconds(server.pid) - before) / figures.pop("calls") * 1e6
    return figures


def _idle(socket: str, server: Any) -> dict[str, int]:
    before = resident(server.pid)
    process = _child("idle", socket, str(IDLE), stdout=subprocess.PIPE, stdin=subprocess.PIPE)
    try:
        of_client = json.loads(process.stdout.readline())
        of_server = (resident(server.pid) - before) // IDLE
        process.communicate(b"\n", timeout=30)
    finally:
        process.kill()
        process.wait()
    return {"server_bytes": of_server, "client_bytes": of_client}


def run(
    seconds: float = 4.0, in_flight: int = 32, rounds: int = 3, servers: Sequence[str] = SERVERS
) -> dict[str, Any]:  # Any: figures, and tables of them
    """Return the figures: medians over the rounds. :param servers: txgrpc, and what it is compared with."""
    results: dict[str, list[dict[str, float]]] = {name: [] for name in servers}
    memory: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as directory:
        sockets = {name: os.path.join(directory, name) for name in results}
        processes = {name: _child(name, sockets[name]) for name in results}
        try:
            for _ in range(rounds):
                for name, figures in results.items():
                    figures.append(_measure(processes[name], sockets[name], seconds, in_flight))
            memory = {f"{name}_server_bytes": resident(process.pid) for name, process in processes.items()}
            idle_bytes = _idle(sockets["txgrpc"], processes["txgrpc"])
        finally:
            for process in processes.values():
                process.kill()
                process.wait()
    found: dict[str, Any] = {
        name: {
            key: round(statistics.median(each[key] for each in figures))
            for key in ("calls_per_second", "p50_us", "processor_us")
        }
        for name, figures in results.items()
    }
    ours, theirs = (found[name]["calls_per_second"] for name in servers)
    found["ratio"] = round(ours / theirs, 2)
    found["in_flight"] = in_flight
    found["resident"] = memory
    found["idle_connection"] = idle_bytes
    return found


def table(found: dict[str, Any]) -> str:
    """Format the figures as a table."""
    title = f"unary, {found['in_flight']} in flight"
    lines = [f"{title:<28}{'calls/s':>10}{'p50 µs':>10}{'CPU µs':>10}{'MB':>8}"]
    for name in ("txgrpc", "grpcio"):
        figures, size = found[name], found["resident"][f"{name}_server_bytes"] / 1e6
        rate, p50, cost = (figures[key] for key in ("calls_per_second", "p50_us", "processor_us"))
        lines.append(f"{name + ' server':<28}{rate:>10}{p50:>10}{cost:>10}{size:>8.0f}")
    lines.append(f"{'txgrpc / grpcio':<28}{found['ratio']:>10}")
    for side in ("server", "client"):
        lines.append(f"{'idle connection, ' + side:<28}{found['idle_connection'][side + '_bytes']:>10} bytes")
    return "\n".join(lines)


ROLES: dict[str, Callable[..., None]] = {  # by name; each is called with the arguments that follow its name
    "txgrpc": serve_txgrpc,
    "grpcio": serve_grpcio,
    "grpclib": serve_grpclib,
    "client": client,
    "idle": idle,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--in-flight", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", metavar="PATH")
    parser.add_argument("--role", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        role, *arguments = options.role
        ROLES[role](*arguments)
        return
    found = run(options.seconds, options.in_flight, options.rounds)
    print(table(found))
    if options.json:
        Path(options.json).write_text(json.dumps({"txgrpc": found}, indent=2) + "\n")


if __name__ == "__main__":
    # Python puts a script's directory first in sys.path; there, txgrpc.py is this file, not the package.
    sys.path[:] = [str(ROOT), *(path for path in sys.path if path != str(Path(__file__).resolve().parent))]
    main()
