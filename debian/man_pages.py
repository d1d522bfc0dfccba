#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write the manual pages into a directory, for debian/rules.

Options, commands and configuration keys are taken from the code.

usage: man_pages.py DIRECTORY
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["COLUMNS"] = "10000"  # each usage in one line

from infranetes import service as node
from infranetes.ctl import cli as ctl
from infranetes.ctl import config_files, kubectl
from infranetes.flexvolume import cli as flexvolume
from infranetes.publish import command as guest
from infranetes_common import __version__, config_reference
from infranetes_common.commandline import DaemonOptions
from infranetes_common.config_reference import Table
from vmserver import service as agent
from vmserver.config import Config as AgentConfig
from vmserver.containers.docker.provider import DockerConfig
from vmserver.containers.machine.provider import MachineConfig
from vmserver.containers.oci.config import OciConfig
from vmserver.containers.systemd.config import SystemdConfig

CONTAINERS = {"docker": DockerConfig, "oci": OciConfig, "systemd": SystemdConfig, "machine": MachineConfig}
DROP_INS = """\
Beside the file, FILE.d/*.toml is read too, in the order of names. A key of a later file wins; tables are
merged, and anything else, lists too, is replaced. Every key has a default, except where it is said that it
has to be given."""
SIGNALS = [
    ("HUP", "read the configuration again; what takes effect and what needs a restart is logged"),
    ("TERM, INT", "end; the pods' virtual machines and their containers go on"),
]
NODE_FILES = [
    ("/etc/infranetes/infranetes.toml", "the configuration; see infranetes.toml(5)"),
    ("/run/infranetes/infranetes.sock", "the CRI's socket"),
    ("/var/lib/infranetes", "records, images and templates"),
]
CONTROL_SOCKET = [("/run/infranetes/control.sock", "the daemon's socket, which only its owner may use")]
DRIVER = "/usr/libexec/kubernetes/kubelet-plugins/volume/exec/infranetes.io~volume/volume"
Sections = Sequence[tuple[str, str]]


def text(words: str) -> str:
    """Return text escaped for a page."""
    return re.sub(r"^(?=[.'])", r"\\&", words.replace("\\", "\\e"), flags=re.M)


def literal(words: str) -> str:
    """Return text that people type escaped for a page, with its hyphens kept from becoming dashes."""
    return text(words).replace("-", "\\-")


def tagged(tag: str, words: str) -> str:
    """Return a paragraph with a bold tag."""
    quoted = literal(tag).replace('"', "\\(dq")
    return f'.TP\n.B "{quoted}"\n{text(words)}'


def listed(items: Sequence[tuple[str, str]]) -> str:
    """Return a paragraph with a bold tag for each item."""
    return "\n".join(tagged(*each) for each in items)


def page(name: str, section: int, whatis: str, sections: Sections) -> str:
    """Return a whole page."""
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    date = f"{datetime.fromtimestamp(int(epoch), UTC):%Y-%m-%d}" if epoch else ""
    head = f'.TH {literal(name.upper())} {section} "{date}" "Infranetes {__version__}"'
    parts = [head, ".ad l", f".SH NAME\n{literal(name)} \\- {text(whatis)}"]
    return "\n".join([*parts, *(f".SH {title}\n{body}" for title, body in sections)]) + "\n"


# ---- commands


def options_of(parser: argparse.ArgumentParser, without: frozenset[str] = frozenset()) -> str:
    """Return the options and arguments of a parser."""
    items = []
    for action in parser._actions:  # argparse has no public name for them
        if isinstance(action, argparse._SubParsersAction) or without & {*action.option_strings}:
            continue
        value = action.metavar or "|".join(map(str, action.choices or ())) or action.dest.upper()
        value = "" if action.nargs == 0 else value
        flags = ", ".join(f"{each} {value}".strip() for each in action.option_strings) or value
        items.append((flags, (action.help or "") % {**vars(action), "prog": parser.prog}))
    return listed(items)


def commands_of(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield the help and the parser of each subcommand, each followed by its own subcommands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            words = {each.dest.partition(" ")[0]: each.help or "" for each in action._choices_actions}
            for name, inner in action.choices.items():
                if name not in words:
                    continue  # an alias
                yield words[name], inner
                yield from commands_of(inner)


def command_page(parser: argparse.ArgumentParser, whatis: str, sections: Sections) -> str:
    """Return the page of a command with all its subcommands."""
    shared = frozenset(flag for action in parser._actions for flag in action.option_strings)
    parts = []
    for words, inner in commands_of(parser):
        usage = " ".join(inner.format_usage().removeprefix("usage: ").split())
        usage = re.sub(r" \[(--json|-h|--config FILE|--socket PATH)\]", "", usage)
        parts.append(tagged(usage.removeprefix(f"{parser.prog} "), words))
        if options := options_of(inner, shared):
            parts.append(f".RS\n{options}\n.RE")
    synopsis = f".B {literal(parser.prog)}\n.RI [ OPTION ...]\n.I COMMAND\n.RI [ ARGUMENT ...]"
    found = [("SYNOPSIS", synopsis), ("DESCRIPTION", text(parser.description or ""))]
    found += [("COMMANDS", "\n".join(parts)), ("OPTIONS", options_of(parser)), *sections]
    return page(parser.prog, 1, whatis, found)


def exit_status(parser: argparse.ArgumentParser) -> tuple[str, str]:
    """Return the section of the exit status, from the parser's epilog."""
    status = (parser.epilog or "").removeprefix("exit status:\n")
    shown = re.sub(r"\n {7}", " ", status)
    codes = [tuple(line.split(maxsplit=1)) for line in shown.splitlines()]
    return "EXIT STATUS", listed([(code, words) for code, words in codes])


def ctl_page() -> str:
    sections = [exit_status(ctl.parser())]
    sections.append(("FILES", listed(CONTROL_SOCKET)))
    return command_page(
        ctl.parser(), "ask this node's infranetes daemon about its virtual machines", sections
    )


def kubectl_page() -> str:
    parser = kubectl.parser()
    sections = [exit_status(parser)]
    parser.prog = "kubectl-infranetes"  # the file's name
    return command_page(parser, "show what the daemons of a cluster know of its pods", sections)


def guest_page() -> str:
    files = listed([("/var/lib/infranetes/guest", "guest images")])
    return command_page(
        guest.parser(),
        "build and publish the image that a pod's virtual machine boots",
        [exit_status(guest.parser()), ("FILES", files)],
    )


def flexvolume_page() -> str:
    calls = listed(
        [
            ("init", "say what the driver can do"),
            ("getvolumename OPTIONS", "say what the volume is called"),
            (
                "mount DIRECTORY OPTIONS",
                "have a pod's directory stand for a volume, which is made if need be",
            ),
            ("unmount DIRECTORY", "take that away"),
        ]
    )
    parser = flexvolume.parser()
    sections = [
        ("SYNOPSIS", ".B infranetes\\-flexvolume\n.RI [ OPTION ...]\n.I CALL\n.RI [ ARGUMENT ...]"),
        ("DESCRIPTION", "kubelet runs it as a FlexVolume driver. It answers with one JSON document."),
        ("CALLS", f'{calls}\n.PP\nEvery other call is answered with "Not supported".'),
        ("OPTIONS", options_of(parser)),
        ("EXIT STATUS", '0: the answer\'s status is "Success"; 1: it is "Failure" or "Not supported".'),
        ("FILES", listed([(DRIVER, "the driver, as kubelet finds it"), *CONTROL_SOCKET])),
    ]
    return page("infranetes-flexvolume", 1, "kubelet's driver for volumes of Infranetes", sections)


# ---- daemons


def daemon_page(options: type[DaemonOptions], whatis: str, words: str, files: Sections) -> str:
    name = options.name
    flags = [
        (f"--{flag} VALUE" if short is None else f"-{short}, --{flag} VALUE", its)
        for flag, short, _, its in options.optParameters
    ]
    flags += [("--version", "show the version"), ("--help", "show the options")]
    sections = [
        ("SYNOPSIS", f".B twistd3\n.RI [ twistd's\\~options ]\n.B {name}\n.RI [ OPTION ...]"),
        ("DESCRIPTION", text(words)),
        (
            "OPTIONS",
            "A flag overrides the configuration's key, which is named in parentheses.\n" + listed(flags),
        ),
        ("SIGNALS", listed(SIGNALS)),
        ("FILES", listed(files)),
        ("SEE ALSO", f".BR {name}.toml (5),\n.BR infranetes\\-ctl (1),\n.BR systemctl (1)"),
    ]
    return page(name, 8, whatis, sections)


def node_page() -> str:
    words = """\
The daemon answers the Container Runtime Interface (CRI) on a unix socket. Each pod sandbox that kubelet asks
for becomes a virtual machine, made by a cloud or by QEMU on the node itself. Its unit is infranetes.service.
It may be ended or killed at any time: the pods go on."""
    return daemon_page(node.Options, "container runtime whose pods are virtual machines", words, NODE_FILES)


def agent_page() -> str:
    words = """\
The agent in a pod's virtual machine takes the machine's identity from the hypervisor, and runs the pod's
containers as the node daemon asks over mutual TLS. Its unit is vmserver.service."""
    files = [("/etc/infranetes/vmserver.toml", "the configuration; see vmserver.toml(5)")]
    return daemon_page(agent.Options, "Infranetes' agent in a virtual machine that is a pod", words, files)


# ---- configuration files


def config_page(name: str, daemon: str, tables: Sequence[Table]) -> str:
    parts = []
    for table in tables:
        parts.append(f'.SS "{literal(f"[{table.name}]" if table.name else "Above all tables")}"')
        for key in table.keys:
            notes = ["It has to be given."] if key.required else []
            notes += [f"Default: {key.default}"] if key.default else []
            words = f"{key.words[:1].upper()}{key.words[1:].removesuffix('.')}."
            parts.append(tagged(key.name, " ".join([words, *notes])))
    sections = [
        ("DESCRIPTION", f"The configuration of {daemon}(8), a file in TOML.\n" + text(DROP_INS)),
        ("KEYS", "\n".join(parts)),
        ("FILES", listed([(f"/etc/infranetes/{name}", "the file")])),
        ("SEE ALSO", f".BR {daemon} (8),\n.BR infranetes\\-ctl (1)"),
    ]
    return page(name, 5, f"configuration of {daemon}", sections)


def node_config_page() -> str:
    return config_page("infranetes.toml", "infranetes", [*config_files.reference(of_machine=False)])


def agent_config_page() -> str:
    said = config_files.pages()
    tables = config_reference.tables(said, "vmserver.toml", AgentConfig, without=("providers",))
    for name, cls in CONTAINERS.items():
        tables += config_reference.tables(
            said, f"providers.{name}", cls, f"providers.{name}", of_machine=False
        )
    return config_page("vmserver.toml", "vmserver", tables)


PAGES: Mapping[str, Callable[[], str]] = {
    "infranetes.8": node_page,
    "infranetes-ctl.1": ctl_page,
    "kubectl-infranetes.1": kubectl_page,
    "infranetes-guest.1": guest_page,
    "infranetes-flexvolume.1": flexvolume_page,
    "infranetes.toml.5": node_config_page,
    "vmserver.8": agent_page,
    "vmserver.toml.5": agent_config_page,
}


def main() -> None:
    """Write all pages."""
    directory = Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    for name, make in PAGES.items():
        (directory / name).write_text(make(), encoding="utf-8")


if __name__ == "__main__":
    main()
