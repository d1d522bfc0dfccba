# SPDX-License-Identifier: Apache-2.0
"""`infranetes-ctl`: pods and their VMs, orphans, the pool."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Awaitable, Callable, Sequence
from ipaddress import ip_address
from pathlib import Path

import attrs
from google.protobuf.message import Message
from twisted.internet.endpoints import UNIXClientEndpoint
from twisted.internet.task import react

from infranetes import config as configuration
from infranetes.config import CONTROL_SOCKET
from infranetes.control import render
from infranetes.control.render_services import same
from infranetes.control.tables import at
from infranetes_common import __version__, quantities
from infranetes_common.concurrency import start
from infranetes_common.errors import ConfigError
from infranetes_common.reactors import IReactor
from infranetes_common.wire import control
from txgrpc import Channel, Code, GrpcError
from txgrpc.client import Stub

DONE, FAILED, USAGE, DOWN = 0, 1, 2, 3
DEFAULT_CONFIG = Path("/etc/infranetes/infranetes.toml")
ASK_SECONDS = 150.0  # the daemon gives the provider two minutes for a list
END_SECONDS = 600.0

_EPILOG = """\
exit status:
  0  done
  1  the daemon refused or failed, not all could be ended, or what is in force for the pod is not
     what it has to be
  2  the command line or the configuration is wrong
  3  no daemon answers
"""

_DESTINATION = re.compile(
    r"(?:\[(?P<v6>[0-9a-fA-F:.]+)\]|(?P<v4>[0-9.]+)):(?P<port>[0-9]{1,5})(?:/(?P<protocol>tcp|udp|sctp))?"
)

Ask = Callable[[Stub, argparse.Namespace], Awaitable[tuple[Message, int]]]
"""Asks the daemon; gives its answer and the exit status."""


async def _pods(stub: Stub, options: argparse.Namespace) -> tuple[control.ListPodsResponse, int]:
    return await stub.ListPods(control.ListPodsRequest(), timeout=ASK_SECONDS), DONE


async def _orphans(stub: Stub, options: argparse.Namespace) -> tuple[control.ListOrphansResponse, int]:
    return await stub.ListOrphans(control.ListOrphansRequest(), timeout=ASK_SECONDS), DONE


async def _end_orphans(stub: Stub, options: argparse.Namespace) -> tuple[control.EndOrphansResponse, int]:
    request = control.EndOrphansRequest(ids=options.ids, dry_run=options.dry_run)
    answer = await stub.EndOrphans(request, timeout=END_SECONDS)
    return answer, FAILED if answer.failed else DONE


async def _pool(stub: Stub, options: argparse.Namespace) -> tuple[control.GetPoolResponse, int]:
    return await stub.GetPool(control.GetPoolRequest(handler=options.handler), timeout=ASK_SECONDS), DONE


async def _drain(stub: Stub, options: argparse.Namespace) -> tuple[control.DrainPoolResponse, int]:
    request = control.DrainPoolRequest(dry_run=options.dry_run, handler=options.handler)
    answer = await stub.DrainPool(request, timeout=END_SECONDS)
    return answer, FAILED if answer.left else DONE


async def _fill(stub: Stub, options: argparse.Namespace) -> tuple[control.FillPoolResponse, int]:
    return await stub.FillPool(control.FillPoolRequest(handler=options.handler), timeout=ASK_SECONDS), DONE


async def _console(stub: Stub, options: argparse.Namespace) -> tuple[control.GetConsoleResponse, int]:
    request = control.GetConsoleRequest(sandbox=options.sandbox)
    return await stub.GetConsole(request, timeout=ASK_SECONDS), DONE


async def _services(stub: Stub, options: argparse.Namespace) -> tuple[Message, int]:
    if options.trace is not None:
        return await _trace(stub, options)
    request = control.GetServicesRequest(pod=options.pod, service=options.service)
    answer = control.GetServicesResponse()
    async for part in stub.GetServices(request, timeout=ASK_SECONDS):
        answer.MergeFrom(part)
    current = all(vm.current for vm in answer.vms) if answer.vms else False
    return answer, DONE if current or not options.pod else FAILED


async def _trace(stub: Stub, options: argparse.Namespace) -> tuple[control.TraceServiceResponse, int]:
    to = options.trace
    request = control.TraceServiceRequest(
        pod=options.pod, address=to.address, protocol=to.protocol, port=to.port
    )
    answer = await stub.TraceService(request, timeout=ASK_SECONDS)
    return answer, DONE if answer.vm.current and same(answer) else FAILED


async def _policies(stub: Stub, options: argparse.Namespace) -> tuple[control.GetPoliciesResponse, int]:
    answer = await stub.GetPolicies(control.GetPoliciesRequest(pod=options.pod), timeout=ASK_SECONDS)
    current = not answer.enabled or all(pod.current for pod in answer.pods)
    return answer, DONE if current or not options.pod else FAILED


async def _sizes(stub: Stub, options: argparse.Namespace) -> tuple[control.ChooseSizeResponse, int]:
    request = control.ChooseSizeRequest(
        cpu_millis=options.cpu,
        memory_bytes=options.memory,
        overhead_bytes=options.overhead,
        gpus=options.gpus,
        provider=options.provider,
        limit=options.limit,
    )
    answer = await stub.ChooseSize(request, timeout=ASK_SECONDS)
    return answer, DONE if answer.fitting else FAILED


_COMMANDS: dict[str, tuple[Ask, str]] = {
    "pods": (_pods, "list pods with their VM, its size, age and cost, and their state"),
    "console": (_console, "show what a pod's VM wrote to its console, also when it is gone"),
    "services": (_services, "list the rules of Kubernetes' Services, and which VMs have them"),
    "policies": (_policies, "say what pods may receive and send by NetworkPolicies, and what is in force"),
    "sizes": (_sizes, "say which size of VM a pod would get, what it costs, and why no cheaper one"),
    "orphans": (_orphans, "list VMs that are tagged ours and that no record knows"),
    "end-orphans": (_end_orphans, "end those, or the ones named"),
    "pool": (_pool, "list the VMs that wait for pods"),
    "drain": (_drain, "end the VMs that wait for pods, and make no more until `fill`"),
    "fill": (_fill, "make VMs that wait for pods again"),
}


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--json", action="store_true", help="answer with one JSON document")
    shared.add_argument(
        "--config", type=Path, metavar="FILE", help=f"the daemon's configuration (default: {DEFAULT_CONFIG})"
    )
    shared.add_argument(
        "--socket",
        type=Path,
        metavar="PATH",
        help=f"the daemon's socket (default: {CONTROL_SOCKET} in its run_dir)",
    )
    dry = argparse.ArgumentParser(add_help=False)
    dry.add_argument("--dry-run", action="store_true", help="say what would be ended, and end nothing")
    top = argparse.ArgumentParser(
        prog="infranetes-ctl",
        description="Asks this node's infranetes daemon about its VMs.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"infranetes-ctl {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (_, words) in _COMMANDS.items():
        parents = [shared, dry] if name in ("end-orphans", "drain") else [shared]
        command = commands.add_parser(name, parents=parents, help=words, description=words)
        if name == "console":
            command.add_argument("sandbox", metavar="SANDBOX", help="the pod's id, or the beginning of it")
        if name in ("services", "policies"):
            command.add_argument(
                "pod",
                nargs="?",
                default="",
                metavar="POD",
                help="this pod alone: namespace/name, or the beginning of its sandbox's id",
            )
        if name == "services":
            _add_services(command)
        if name == "sizes":
            _add_sizes(command)
        if name in ("pool", "drain", "fill"):
            words = 'only the pool of this handler; "": the node\'s own (default: all pools)'
            command.add_argument("--handler", metavar="NAME", help=words)
        if name == "end-orphans":
            command.add_argument("ids", nargs="*", metavar="VM", help="its id, as `orphans` lists it")
    return top


@attrs.frozen
class Destination:
    """What connections are made to."""

    address: str
    port: int
    protocol: str

    def __str__(self) -> str:
        return f"{at(self.address, self.port)}/{self.protocol}"


def destination(text: str) -> Destination:
    """Read ADDRESS:PORT/PROTOCOL. :raise ArgumentTypeError: it is none."""
    match = _DESTINATION.fullmatch(text)
    try:
        if match is None or not 0 < int(match["port"]) < 65536:
            raise ValueError
        address = str(ip_address(match["v6"] or match["v4"]))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not like 10.96.0.10:53/udp, [fd00::a]:53/udp or 10.96.0.1:443"
        ) from None
    return Destination(address, int(match["port"]), match["protocol"] or "tcp")


def _quantity(read: Callable[[str], int]) -> Callable[[str], int]:
    """Return a type of arguments that are Kubernetes' quantities."""

    def quantity(text: str) -> int:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return quantity


def _count(text: str) -> int:
    """Read a small number. :raise ArgumentTypeError: it is none."""
    if not re.fullmatch(r"[0-9]{1,4}", text):
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is no number up to 9999")
    return int(text)


def _add_sizes(command: argparse.ArgumentParser) -> None:
    memory = _quantity(quantities.units)
    command.add_argument(
        "--cpu", type=_quantity(quantities.thousandths), default=0, metavar="CPUS", help="such as 2 or 500m"
    )
    command.add_argument("--memory", type=memory, default=0, metavar="BYTES", help="such as 8Gi")
    command.add_argument("--gpus", type=_count, default=0, metavar="N", help="how many GPUs")
    command.add_argument(
        "--overhead", type=memory, default=0, metavar="BYTES", help="the overhead of the pod's RuntimeClass"
    )
    command.add_argument(
        "--provider",
        default="",
        metavar="NAME",
        help="whose (default: the first that has sizes)",
    )
    command.add_argument("--limit", type=_count, default=0, metavar="N", help="how many are listed")


def _add_services(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--service", default="", metavar="NAMESPACE/NAME", help="only the rules of this Service"
    )
    command.add_argument(
        "--trace",
        type=destination,
        metavar="ADDRESS:PORT/PROTOCOL",
        help="say what becomes of POD's connections to this, such as 10.96.0.10:53/udp",
    )


def socket_of(options: argparse.Namespace) -> Path:
    """Return the path of the daemon's socket.

    :raise ConfigError: the daemon's configuration can't be read."""
    if options.socket is not None:
        return Path(options.socket)
    path = options.config
    if path is None and DEFAULT_CONFIG.exists():
        path = DEFAULT_CONFIG
    return Path(configuration.load(None if path is None else str(path), {}).control_socket)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return the exit status."""
    options = parser().parse_args(arguments)
    if getattr(options, "trace", None) is not None and not options.pod:
        return _say(USAGE, "--trace needs a POD, from whose VM connections are made")
    try:
        socket = socket_of(options)
    except ConfigError as error:
        return _say(USAGE, str(error))
    outcome = [FAILED]

    async def run(reactor: IReactor) -> None:
        outcome[0] = await ask(reactor, socket, options)

    try:
        react(lambda reactor: start(run(reactor)))
    except SystemExit as end:
        if end.code:
            return FAILED
    except KeyboardInterrupt:
        return 130
    return outcome[0]


async def ask(reactor: IReactor, socket: Path, options: argparse.Namespace) -> int:
    """Ask the daemon, print its answer and return the exit status."""
    channel = Channel(reactor, UNIXClientEndpoint(reactor, str(socket), timeout=10))
    try:
        answer, code = await _COMMANDS[options.command][0](channel.stub(control.Control), options)
    except GrpcError as error:
        if error.code is Code.UNAVAILABLE and not _listens(socket):
            return _say(DOWN, _why_down(socket))
        return _say(FAILED, error.message or error.code.name)
    finally:
        await channel.close()
    try:
        if options.json:
            print(json.dumps(render.as_json(options.command, answer, options), indent=2))
        else:
            print(render.as_text(options.command, answer, options))
    except BrokenPipeError:  # `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def _listens(socket: Path) -> bool:
    import socket as sockets

    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM) as probe:
        probe.settimeout(2)
        try:
            probe.connect(str(socket))
        except OSError:
            return False
    return True


def _why_down(socket: Path) -> str:
    locked = socket.parent.exists() and not os.access(socket.parent, os.X_OK)
    if locked or (socket.exists() and not os.access(socket, os.W_OK)):
        return f"{socket} may not be used by this user: try it as root"
    why = "nobody listens there" if socket.exists() else "it is not there"
    return (
        f"no infranetes daemon answers on {socket}: {why}. Is it running (systemctl status infranetes)? "
        "Does it have another run_dir (--config, --socket)?"
    )


def _say(code: int, words: str) -> int:
    print(f"infranetes-ctl: {words}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
