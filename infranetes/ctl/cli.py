# SPDX-License-Identifier: Apache-2.0
"""`infranetes-ctl`: the command line, and its calls of the daemon."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from twisted.internet.endpoints import UNIXClientEndpoint
from twisted.internet.task import react

from infranetes import config as configuration
from infranetes.config import Config
from infranetes.config.check import Make, made_of_keys
from infranetes.config.schema import CONTROL_SOCKET
from infranetes.ctl.arguments import DEFAULT_CONFIG, exactly
from infranetes.ctl.command_line import CommandLine
from infranetes.ctl.commands import COMMANDS, Command
from infranetes.ctl.session import (
    DONE,
    DOWN,
    FAILED,
    INTERRUPTED,
    USAGE,
    Session,
    config_file,
    written,
)
from infranetes.ctl.view import JSON, TEXT, YAML
from infranetes_common import __version__
from infranetes_common.concurrency import sleep, start
from infranetes_common.errors import ConfigError, InfranetesError
from infranetes_common.reactors import IReactor
from infranetes_common.wire.control_rpcs import ControlStub
from txgrpc import Channel, Code, Disconnected, GrpcError

__all__ = ["DONE", "DOWN", "FAILED", "INTERRUPTED", "USAGE", "ask", "main", "parser", "read", "socket_of"]

ENDING_SECONDS = 0.2  # how long a killed daemon may take to close its sockets, one by one
_EPILOG = """\
exit status:
  0    done
  1    the daemon refused or failed, not all could be ended or asked, what is in force for the pod is
       not what it has to be, or this user may not use the daemon's socket
  2    the command line or the configuration is wrong
  3    no daemon answers
  130  interrupted, as `--watch` ends
  any  of `enter` and `exec`: that of the shell or command
"""


def parser() -> CommandLine:
    """Return the parser of the command line."""
    top = CommandLine(
        prog="infranetes-ctl",
        description="Asks this node's infranetes daemon about its VMs.",
        epilog=_EPILOG,
    )
    top.hints |= dict.fromkeys(("enter", "exec"), " (options of the command that is run follow a `--`)")
    _add_shared(top)
    shared = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    _add_shared(shared)
    commands = top.add_subparsers(
        dest="command", required=True, metavar="COMMAND", parser_class=argparse.ArgumentParser
    )
    top.commands = {name: _add(commands, name, each, shared) for name, each in COMMANDS.items() if each.alone}
    top.kinds |= {"describe": True, "top": False}
    for whole in sorted({each.part_of for each in COMMANDS.values() if each.part_of}):
        parts = top.commands[whole].add_subparsers(metavar="[COMMAND]", title="commands")
        for name, each in COMMANDS.items():
            if each.part_of != whole:
                continue
            bare = argparse.ArgumentParser(add_help=False)
            each.arguments(bare)
            top.commands[whole].set_defaults(**vars(bare.parse_args([])))
            # Without SUPPRESS, `pool --handler NAME drain` would mean all pools.
            part = _add(parts, name, each, shared, each.aliases, argument_default=argparse.SUPPRESS)
            part.set_defaults(command=name)
            top.parts |= {(whole, called): part for called in (name, *each.aliases)}
    return top


def _add_shared(to: argparse.ArgumentParser) -> None:
    to.add_argument("--version", action="version", version=f"infranetes-ctl {__version__}")
    to.add_argument("--json", action="store_true", help="answer with JSON")
    to.add_argument(
        "--config", type=Path, metavar="FILE", help=f"the daemon's configuration (default: {DEFAULT_CONFIG})"
    )
    to.add_argument(
        "--socket",
        type=Path,
        metavar="PATH",
        help=f"the daemon's socket (default: {CONTROL_SOCKET} in its run_dir)",
    )


def _add(
    to: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    command: Command,
    shared: argparse.ArgumentParser,
    aliases: Sequence[str] = (),
    argument_default: str | None = None,
) -> argparse.ArgumentParser:
    added = to.add_parser(
        name,
        aliases=aliases,
        parents=[shared],
        help=command.words,
        description=command.words,
        argument_default=argument_default,
        allow_abbrev=False,
    )
    command.arguments(added)
    return added


def read(words: Sequence[str]) -> argparse.Namespace:
    """Parse a command line. `-o json` means `--json`, and `-n NAMESPACE POD` means NAMESPACE/POD.

    :raise SystemExit: it is wrong, or asks for help."""
    options = parser().read(words)
    options.json = options.json or getattr(options, "form", TEXT) in (JSON, YAML)
    if getattr(options, "pod", "") and getattr(options, "namespace", None) and "/" not in options.pod:
        options.pod = f"{options.namespace}/{options.pod}"
    if options.command in ("enter", "exec"):
        options.words = exactly(options.words, words)
    return options


def socket_of(options: argparse.Namespace) -> Path:
    """Return the path of the daemon's socket.

    :raise ConfigError: the daemon's configuration can't be read."""
    if options.socket is not None:
        return Path(options.socket)
    path = config_file(options)
    return Path(configuration.load(None if path is None else str(path), {}).control_socket)


def main(arguments: Sequence[str] | None = None, make: Make = made_of_keys) -> int:
    """Run the command and return the exit status. :param make: for `config check`."""
    given = sys.argv[1:] if arguments is None else arguments
    options = read(given)
    options.make = make
    if getattr(options, "trace", None) is not None and not options.pod:
        return _refused(options, USAGE, "--trace needs a POD, from whose VM connections are made")
    if (offline := COMMANDS[options.command].offline) is not None:
        return offline(options)
    try:
        socket = socket_of(options)
    except ConfigError as error:
        if COMMANDS[options.command].needs_config:
            return _refused(options, USAGE, str(error))
        socket = Path(Config().control_socket)
    outcome = [INTERRUPTED]  # also if the reactor is stopped by a signal

    async def run(reactor: IReactor) -> None:
        outcome[0] = await ask(reactor, socket, options)

    try:
        react(lambda reactor: start(run(reactor)))
    except SystemExit as end:
        if end.code:
            return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    return outcome[0]


async def ask(reactor: IReactor, socket: Path, options: argparse.Namespace) -> int:
    """Carry out a command, print what it says and return the exit status."""
    channel = Channel(reactor, UNIXClientEndpoint(reactor, str(socket), timeout=10))
    try:
        return await COMMANDS[options.command].run(Session(reactor, ControlStub(channel), options))
    except GrpcError as error:
        if isinstance(error, Disconnected) and _listens(socket):
            await sleep(reactor, ENDING_SECONDS)
        if error.code is Code.UNAVAILABLE and not _listens(socket):
            return _refused(options, *_why_down(socket))
        return _refused(options, FAILED, error.message or error.code.name)
    except InfranetesError as error:
        return _refused(options, FAILED, str(error))
    except BrokenPipeError:  # `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    finally:
        await channel.close()


def _listens(socket: Path) -> bool:
    return _trouble(socket) is None


def _trouble(socket: Path) -> OSError | None:
    """Return why the socket takes no connection; None: it does."""
    import socket as sockets

    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM) as probe:
        probe.settimeout(2)
        try:
            probe.connect(str(socket))
        except OSError as error:
            return error
    return None


def _why_down(socket: Path) -> tuple[int, str]:
    """Return the exit status and the words for a socket that takes no connection."""
    trouble = _trouble(socket)
    if isinstance(trouble, PermissionError):
        return FAILED, f"{socket} may not be used by this user: try it as root"
    why = "nobody listens there" if isinstance(trouble, ConnectionRefusedError) else "it is not there"
    return DOWN, (
        f"no infranetes daemon answers on {socket}: {why}. Is it running (systemctl status infranetes)? "
        "Does it have another run_dir (--config, --socket)?"
    )


def _refused(options: argparse.Namespace, code: int, words: str) -> int:
    """Print why there is no answer, with --json as a document; return the exit status."""
    if options.json:
        print(written({"error": words}, options, in_line=True))
    print(f"infranetes-ctl: {words}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
