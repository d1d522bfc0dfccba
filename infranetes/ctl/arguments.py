# SPDX-License-Identifier: Apache-2.0
"""The arguments of infranetes-ctl's commands."""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from ipaddress import ip_address
from pathlib import Path

import attrs

from infranetes.ctl.selecting import label_selector
from infranetes.ctl.tables import at
from infranetes.ctl.view import JSON, NAME, TEXT, WIDE, YAML
from infranetes_common import quantities

DEFAULT_CONFIG = Path("/etc/infranetes/infranetes.toml")

_UNITS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400}

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


def moment(text: str) -> float:
    """Read an age or a time; return seconds since 1970 UTC. :raise ArgumentTypeError: it is neither."""
    if re.fullmatch(r"([0-9]{1,9}(ms|[smhd]))+", text):
        parts = re.findall(r"([0-9]+)(ms|[smhd])", text)
        return time.time() - sum(int(number) * _UNITS[unit] for number, unit in parts)
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text[:80]!r} is neither an age such as 90s, 5m or 1h30m nor a time such as "
            "2026-01-31T12:00:00Z"
        ) from None
    return (found if found.tzinfo is not None else found.replace(tzinfo=UTC)).timestamp()


def _lines(text: str) -> int:
    """Read a number of lines. :raise ArgumentTypeError: it is none."""
    if not re.fullmatch(r"[0-9]{1,7}", text):
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is no number of lines")
    return int(text)


def sizes(command: argparse.ArgumentParser) -> None:
    """Add what the pod asks for, and --output."""
    answer(command)
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
    policies(command)
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


def answer(command: argparse.ArgumentParser) -> None:
    """Add the option --output to a command whose answer is one document."""
    _output(command, JSON, YAML)


def _output(command: argparse.ArgumentParser, *forms: str) -> None:
    words = "the form of the answer (default: for people)"
    command.add_argument(
        "--output", "-o", dest="form", choices=forms, default=TEXT, metavar="|".join(forms), help=words
    )


def _listed(command: argparse.ArgumentParser, *forms: str, ids: str) -> None:
    """Add --output, --no-headers and --quiet. :param ids: what has the ids that --quiet lists."""
    _output(command, *forms, JSON, YAML)
    command.add_argument("--no-headers", action="store_true", help="print the rows alone")
    command.add_argument("--quiet", "-q", action="store_true", help=f"print the ids of {ids} alone")


def _scoped(command: argparse.ArgumentParser, *, labels: bool = True) -> None:
    """Add --namespace, --all-namespaces and --selector."""
    of_namespace(command)
    words = "pods of all namespaces, which is the default; for hands that are used to it"
    command.add_argument("--all-namespaces", "-A", action="store_true", help=words)
    if labels:
        command.add_argument(
            "--selector",
            "-l",
            type=label_selector,
            metavar="SELECTOR",
            help="pods with these labels, such as app=web,tier!=front or 'env in (a,b),!canary'",
        )


def of_namespace(command: argparse.ArgumentParser) -> None:
    """Add --namespace."""
    words = "of this namespace"
    command.add_argument("--namespace", "-n", type=_word, metavar="NAMESPACE", help=words)


def _word(text: str) -> str:
    """Read a name of Kubernetes'. :raise ArgumentTypeError: it is none."""
    if not re.fullmatch(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", text):
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is no name of a namespace")
    return text


def watch(command: argparse.ArgumentParser) -> None:
    """Add --watch."""
    command.add_argument(
        "--watch",
        "-w",
        action="store_true",
        help="list again as things change: on a terminal in place, else as a line of JSON for each change",
    )


def pods(command: argparse.ArgumentParser) -> None:
    """Add what selects pods, and how they are listed."""
    _names(command)
    _scoped(command)
    words = "those that are gone and still remembered too, such as those that failed"
    command.add_argument("--all", "-a", action="store_true", help=words)
    _listed(command, WIDE, NAME, ids="sandboxes")
    watch(command)


def pods_of_cluster(command: argparse.ArgumentParser) -> None:
    """Add what selects pods of a cluster, as kubectl has it, and how they are listed."""
    _names(command)
    words = "of this namespace (default: that of the context)"
    command.add_argument("--namespace", "-n", type=_word, metavar="NAMESPACE", help=words)
    words = "of all namespaces, as far as they may be seen"
    command.add_argument("--all-namespaces", "-A", action="store_true", help=words)
    command.add_argument(
        "--selector", "-l", type=label_selector, metavar="SELECTOR", help="with these labels"
    )
    _listed(command, WIDE, NAME, ids="sandboxes")


def containers(command: argparse.ArgumentParser) -> None:
    """Add what selects containers, and how they are listed."""
    _names(command, "CONTAINER", "its name or its id, or the beginning of one")
    _scoped(command)
    command.add_argument("--all", "-a", action="store_true", help="those that do not run too")
    command.add_argument("--pod", default="", metavar="POD", help=f"of this pod: {_POD}")
    _listed(command, WIDE, NAME, ids="containers")
    watch(command)


def events(command: argparse.ArgumentParser) -> None:
    """Add what selects events, and how they are listed."""
    maybe_pod(command)
    _scoped(command)
    words = "of the last while, such as 90s, 5m or 2h, or since a time such as 2026-01-31T12:00:00Z"
    command.add_argument("--since", type=moment, metavar="AGE|TIME", help=words)
    command.add_argument("--failed", action="store_true", help="only what has failed")
    _output(command, JSON, YAML)
    command.add_argument("--no-headers", action="store_true", help="print the rows alone")
    watch(command)


def listed_vms(command: argparse.ArgumentParser) -> None:
    """Add --watch, and how VMs are listed."""
    _listed(command, ids="VMs")
    watch(command)


def top(command: argparse.ArgumentParser) -> None:
    """Add what selects pods, and how their figures are listed."""
    _names(command)
    _scoped(command, labels=False)
    _output(command, JSON, YAML)
    command.add_argument("--no-headers", action="store_true", help="print the rows alone")
    watch(command)


def _names(command: argparse.ArgumentParser, metavar: str = "POD", words: str = "") -> None:
    command.add_argument("names", nargs="*", default=[], metavar=metavar, help=words or _POD)


_POD = "namespace/name or name, or its sandbox's id; of an id, and of a name to look at, the beginning"


def pod(command: argparse.ArgumentParser) -> None:
    """Add POD and --namespace."""
    command.add_argument("pod", metavar="POD", help=_POD)
    of_namespace(command)


def described(command: argparse.ArgumentParser) -> None:
    """Add POD and --output."""
    pod(command)
    answer(command)


def _follow(command: argparse.ArgumentParser, words: str) -> None:
    command.add_argument("--follow", "-f", action="store_true", help=words)


def console(command: argparse.ArgumentParser) -> None:
    """Add POD, --output and --follow."""
    described(command)
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


def checkpoint(command: argparse.ArgumentParser) -> None:
    """Add POD and FILE."""
    pod(command)
    words = "the file of the node that is written, which must not be there; root alone may read it"
    command.add_argument("file", type=Path, metavar="FILE", help=words)


def keep(command: argparse.ArgumentParser) -> None:
    """Add POD, --as, --replace and --output."""
    described(command)
    words = "the name, in the pod's namespace, by which pods say what they start from"
    command.add_argument("--as", dest="name", required=True, metavar="NAME", help=words)
    words = "once it is there, remove what was kept under this name before"
    command.add_argument("--replace", action="store_true", help=words)


def kept(command: argparse.ArgumentParser) -> None:
    """Add --namespace, and how kept states are listed."""
    _scoped(command, labels=False)
    _listed(command, WIDE, NAME, ids="kept states")


def remove_kept(command: argparse.ArgumentParser) -> None:
    """Add NAME..., --namespace and --output."""
    words = "NAMESPACE/NAME, or NAME if one namespace alone has it"
    command.add_argument("names", nargs="*", default=[], metavar="NAME", help=words)
    of_namespace(command)
    answer(command)


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


def execute(command: argparse.ArgumentParser) -> None:
    """Add POD, the container, --stdin and --tty, and COMMAND..."""
    pod(command)
    words = "which of its containers: its name, or the beginning of its id (default: the only one that runs)"
    command.add_argument(
        "--container", "-c", dest="in_container", default="", metavar="CONTAINER", help=words
    )
    command.add_argument("--stdin", "-i", action="store_true", help="pass standard input on")
    words = "give it a terminal, if standard input and output are one"
    command.add_argument("--tty", "-t", action="store_true", help=words)
    words = "what to run, with its arguments, behind `--`"
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
    """Add POD, [CONTAINER], and what is printed of the log."""
    pod(command)
    words = "its name, or the beginning of its id (default: the only one)"
    command.add_argument("container", nargs="?", default="", metavar="CONTAINER", help=words)
    _container(command)
    _follow(command, "go on as the container writes more, until it has ended")
    command.add_argument("--tail", type=_lines, metavar="N", help="begin with the last N lines")
    words = "lines of the last while, such as 90s, 5m or 2h, or since a time such as 2026-01-31T12:00:00Z"
    command.add_argument("--since", type=moment, metavar="AGE|TIME", help=words)
    words = "print when each line was written, as kubectl does"
    command.add_argument("--timestamps", "-t", action="store_true", help=words)
    words = "the log of the container that was there before, if kubelet has kept it"
    command.add_argument("--previous", "-p", action="store_true", help=words)


def _container(command: argparse.ArgumentParser) -> None:
    words = "the same, as kubectl has it"
    command.add_argument(
        "--container", "-c", dest="in_container", default="", metavar="CONTAINER", help=words
    )


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


def policies(command: argparse.ArgumentParser) -> None:
    """Add [POD], --namespace and --output."""
    maybe_pod(command)
    of_namespace(command)
    answer(command)


def explained(command: argparse.ArgumentParser) -> None:
    """Add [NAME] and --output."""
    words = "an annotation, without its prefix too, or a key of infranetes.toml (default: all annotations)"
    command.add_argument("name", nargs="?", default="", metavar="ANNOTATION", help=words)
    answer(command)


def handler(command: argparse.ArgumentParser) -> None:
    """Add --handler."""
    words = 'only the pool of this handler; "": the node\'s own (default: all pools)'
    command.add_argument("--handler", metavar="NAME", help=words)


def watched_pool(command: argparse.ArgumentParser) -> None:
    """Add --handler and --watch, and how VMs are listed."""
    handler(command)
    listed_vms(command)


def dry_run(command: argparse.ArgumentParser) -> None:
    """Add --dry-run and --output."""
    answer(command)
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
    answer(command)
    words = "the file is for another machine: don't look for what it names on this one"
    command.add_argument("--elsewhere", action="store_true", help=words)
    words = f"the file, which is read with its drop-ins (default: that of --config, or {DEFAULT_CONFIG})"
    command.add_argument("file", nargs="?", default=None, type=Path, metavar="FILE", help=words)
