# SPDX-License-Identifier: Apache-2.0
"""The arguments of infranetes-ctl's commands."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from ipaddress import ip_address
from pathlib import Path

import attrs

from infranetes.ctl.tables import at
from infranetes_common import quantities

DEFAULT_CONFIG = Path("/etc/infranetes/infranetes.toml")

_DESTINATION = re.compile(
    r"(?:\[(?P<v6>[0-9a-fA-F:.]+)\]|(?P<v4>[0-9.]+)):(?P<port>[0-9]{1,5})(?:/(?P<protocol>tcp|udp|sctp))?"
)


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


def _lines(text: str) -> int:
    """Read a number of lines. :raise ArgumentTypeError: it is none."""
    if not re.fullmatch(r"[0-9]{1,7}", text):
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is no number of lines")
    return int(text)


def sizes(command: argparse.ArgumentParser) -> None:
    """Add what the pod asks for."""
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
        help="the provider whose sizes are listed (default: the first that has sizes)",
    )
    command.add_argument("--limit", type=_count, default=0, metavar="N", help="how many are listed")


def services(command: argparse.ArgumentParser) -> None:
    """Add [POD], --service and --trace."""
    maybe_pod(command)
    command.add_argument(
        "--service", default="", metavar="NAMESPACE/NAME", help="only the rules of this Service"
    )
    command.add_argument(
        "--trace",
        type=destination,
        metavar="ADDRESS:PORT/PROTOCOL",
        help="say what becomes of POD's connections to this, such as 10.96.0.10:53/udp",
    )


def nothing(command: argparse.ArgumentParser) -> None:
    """Add no argument."""


def watch(command: argparse.ArgumentParser) -> None:
    """Add --watch."""
    command.add_argument(
        "--watch",
        "-w",
        action="store_true",
        help="list again as things change: on a terminal in place, else as a line of JSON for each change",
    )


_POD = "namespace/name or name, or its sandbox's id or the beginning of it"


def pod(command: argparse.ArgumentParser) -> None:
    """Add POD."""
    command.add_argument("pod", metavar="POD", help=_POD)


def _follow(command: argparse.ArgumentParser, words: str) -> None:
    command.add_argument("--follow", "-f", action="store_true", help=words)


def console(command: argparse.ArgumentParser) -> None:
    """Add POD and --follow."""
    pod(command)
    _follow(command, "go on as the VM writes more, until it is gone")


def _port(text: str) -> int:
    """Read a port. :raise ArgumentTypeError: it is none."""
    if not re.fullmatch(r"[0-9]{1,5}", text) or not int(text) < 65536:
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is no port, nor 0 for any that is free")
    return int(text)


def screenshot(command: argparse.ArgumentParser) -> None:
    """Add POD and --output."""
    pod(command)
    words = "what is written, and replaced if it is there (default: standard output)"
    command.add_argument("--output", "-o", type=Path, metavar="FILE", help=words)


def vnc(command: argparse.ArgumentParser) -> None:
    """Add POD, and --listen or --unix."""
    pod(command)
    where = command.add_mutually_exclusive_group()
    words = "the port of 127.0.0.1 for viewers (default: any that is free)"
    where.add_argument("--listen", type=_port, default=0, metavar="PORT", help=words)
    words = "a unix socket for viewers in its place, which this user alone may use"
    where.add_argument("--unix", type=Path, metavar="PATH", help=words)


def enter(command: argparse.ArgumentParser) -> None:
    """Add POD and [COMMAND...]."""
    pod(command)
    words = "what to run, with its arguments, behind `--` (default: root's login shell)"
    # With a default: else argparse takes it for required where POD is missing, too.
    command.add_argument("words", nargs="*", default=[], metavar="COMMAND", help=words)


def exactly(words: Sequence[str], command_line: Sequence[str]) -> list[str]:
    """Return a command as it was given: argparse takes more away than the first `--`.

    :param words: what is left of it. :param command_line: the whole command line."""
    if "--" not in command_line:
        return list(words)
    behind = list(command_line[list(command_line).index("--") + 1 :])
    before = sum(word != "--" for word in words) - sum(word != "--" for word in behind)
    return [*words[: max(before, 0)], *behind[max(-before, 0) :]]


def logs(command: argparse.ArgumentParser) -> None:
    """Add POD, [CONTAINER], --follow and --tail."""
    pod(command)
    words = "its name, or the beginning of its id (default: the only one)"
    command.add_argument("container", nargs="?", default="", metavar="CONTAINER", help=words)
    _follow(command, "go on as the container writes more, until it has ended")
    command.add_argument("--tail", type=_lines, metavar="N", help="begin with the last N lines")


def bundle(command: argparse.ArgumentParser) -> None:
    """Add [FILE]."""
    words = "what is written, and must not be there (default: infranetes-support-NODE-TIME.tar.gz, here)"
    command.add_argument("file", nargs="?", type=Path, metavar="FILE", help=words)


def maybe_pod(command: argparse.ArgumentParser) -> None:
    """Add [POD]."""
    command.add_argument(
        "pod",
        nargs="?",
        default="",
        metavar="POD",
        help=f"this pod alone: {_POD}",
    )


def handler(command: argparse.ArgumentParser) -> None:
    """Add --handler."""
    words = 'only the pool of this handler; "": the node\'s own (default: all pools)'
    command.add_argument("--handler", metavar="NAME", help=words)


def watched_pool(command: argparse.ArgumentParser) -> None:
    """Add --handler and --watch."""
    handler(command)
    watch(command)


def dry_run(command: argparse.ArgumentParser) -> None:
    """Add --dry-run."""
    command.add_argument("--dry-run", action="store_true", help="say what would be ended, and end nothing")


def drain(command: argparse.ArgumentParser) -> None:
    """Add --handler and --dry-run."""
    handler(command)
    dry_run(command)


def end_orphans(command: argparse.ArgumentParser) -> None:
    """Add [VM...] and --dry-run."""
    dry_run(command)
    command.add_argument("ids", nargs="*", metavar="VM", help="its id, as `orphans` lists it")


def config_file(command: argparse.ArgumentParser) -> None:
    """Add [FILE] and --elsewhere."""
    words = "the file is for another machine: don't look for what it names on this one"
    command.add_argument("--elsewhere", action="store_true", help=words)
    words = f"the file, which is read with its drop-ins (default: that of --config, or {DEFAULT_CONFIG})"
    command.add_argument("file", nargs="?", default=None, type=Path, metavar="FILE", help=words)
