# SPDX-License-Identifier: Apache-2.0
"""How each kind of node starts its kubelet, and the one file that points it at the daemon's socket.

Nothing that is there is changed: kubelet's unit gets a drop-in, and k3s and RKE2 a file beside their own.
Taking it back is deleting that file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import attrs

from infranetes.installer.node import Programs
from infranetes_common.errors import FailedPrecondition

SOCKET = "unix:///run/infranetes/infranetes.sock"
_DROP_IN = "/etc/systemd/system/{unit}.d/zz-infranetes.conf"
_COMMENT = "# Made by Infranetes' installer, whose removal deletes it.\n"
_FLAG = f"--container-runtime-endpoint={SOCKET}"


@attrs.frozen
class Kind:
    """How a node of one kind is set up.

    :ivar name: for people. :ivar units: the units that may run its kubelet.
    :ivar runtime: its own runtime's socket. :ivar kubelet_dir: kubelet's directory.
    :ivar file: what points kubelet at the daemon; "": a drop-in of the unit.
    """

    name: str
    units: tuple[str, ...]
    runtime: str
    kubelet_dir: str = "/var/lib/kubelet"
    file: str = ""


KINDS: Sequence[Kind] = (
    Kind(
        "k3s",
        ("k3s.service", "k3s-agent.service"),
        "/run/k3s/containerd/containerd.sock",
        file="/etc/rancher/k3s/config.yaml.d/zz-infranetes.yaml",
    ),
    Kind(
        "RKE2",
        ("rke2-server.service", "rke2-agent.service"),
        "/run/k3s/containerd/containerd.sock",
        file="/etc/rancher/rke2/config.yaml.d/zz-infranetes.yaml",
    ),
    Kind("kubelet", ("kubelet.service",), "/run/containerd/containerd.sock"),
)


@attrs.frozen
class Kubelet:
    """A node's kubelet. :ivar unit: the unit that runs it."""

    kind: Kind
    unit: str

    def files(self, programs: Programs) -> Mapping[str, str]:
        """Return the file that points it at the daemon's socket, by its path.

        :raise FailedPrecondition: its unit starts it in a way that can't be added to."""
        if self.kind.file:
            return {self.kind.file: f"{_COMMENT}kubelet-arg+:\n- {_FLAG.removeprefix('--')}\n"}
        path = drop_in(self.unit)
        return {path: _unit_drop_in(started_by(programs.run("systemctl", "cat", self.unit), path, self.unit))}


def drop_in(unit: str) -> str:
    """Return the path of our drop-in of a unit; the last of them all, as the last one counts."""
    return _DROP_IN.format(unit=unit)


def _unit_drop_in(command: str) -> str:
    return (
        f"{_COMMENT}[Unit]\nWants=infranetes.service\nAfter=infranetes.service\n\n"
        f"[Service]\nExecStart=\nExecStart={command} {_FLAG}\n"
    )


def started_by(said: str, ours: str, unit: str) -> str:
    """Return the command that starts kubelet without our drop-in.

    :param said: what `systemctl cat` says: the unit and its drop-ins, each below a comment with its path.
    :raise FailedPrecondition: there is not exactly one, or it starts something else."""
    commands: list[str] = []
    for file, text in _files(said):
        if file == ours:
            continue
        section = ""
        for line in re.sub(r"[ \t]*\\\n[ \t]*", " ", text).splitlines():
            line = line.strip()
            if line.startswith("["):
                section = line
            elif section == "[Service]" and (found := re.fullmatch(r"ExecStart\s*=\s*(.*)", line)):
                commands = [*commands, found[1]] if found[1] else []
    if len(commands) != 1:
        raise FailedPrecondition(
            f"{unit} has {len(commands)} commands ExecStart=, and the installer can add the daemon's socket "
            f"to one: add {_FLAG} to kubelet yourself, and install with kubelet.manage=false"
        )
    (command,) = commands
    program = command.split()[0].lstrip("-@:+!")
    if not program.rpartition("/")[2].startswith("kubelet"):
        raise FailedPrecondition(
            f"{unit} starts {program}, not kubelet itself, and the installer can't add a flag to that: add "
            f"{_FLAG} to kubelet yourself, and install with kubelet.manage=false"
        )
    return command


def _files(said: str) -> list[tuple[str, str]]:
    parts = re.split(r"^# (/\S+)$\n", said, flags=re.M)
    return list(zip(parts[1::2], parts[2::2], strict=True))


def find(programs: Programs) -> Kubelet:
    """Return the node's kubelet: the one of which a unit is loaded, and runs.

    :raise FailedPrecondition: none does; says which were looked for."""
    for kind in KINDS:
        for unit in kind.units:
            shown = programs.run("systemctl", "show", "--property=LoadState,ActiveState", unit)
            states = dict(line.partition("=")[::2] for line in shown.splitlines())
            if states.get("LoadState") == "loaded" and states.get("ActiveState") in ("active", "activating"):
                return Kubelet(kind, unit)
    looked = ", ".join(unit for kind in KINDS for unit in kind.units)
    raise FailedPrecondition(
        f"no unit of this node runs a kubelet ({looked}): the installer knows kubelet.service, k3s and RKE2; "
        "where kubelet is started otherwise, install Debian's packages or the wheel, by docs/install.md"
    )
