# SPDX-License-Identifier: Apache-2.0
"""Keeps the namespaces of a node other than the first: `python -m tests.cluster.neighbour` runs in them.

It makes the node's mounts, and runs the registry on the node's own loopback. The supervisor connects its
network to the first node's, and runs the node's programs in the namespaces."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.cluster import images, world
from tests.cluster.components import Program
from tests.cluster.nodes import NAMESPACES, Node
from tests.cluster.paths import REGISTRY, Paths


def program(node: Node, image_dir: Path) -> Program:
    """Return the program, which is to be `ready` before the supervisor makes the first node's mounts."""
    words = [node.cluster.name, str(node.number), str(image_dir)]
    return Program(node.name, ["unshare", *NAMESPACES, sys.executable, "-m", __name__, *words])


def _sign(node: Node) -> Path:
    return node.place / "ready"


def ready(node: Node) -> bool:
    """Return whether programs may be run on the node."""
    return _sign(node).exists()


def join(node: Node) -> None:
    """Connect the node's network to the first node's by a veth cable."""
    pid = node.cluster.pid(node.name).read_text()
    _ip(f"""\
link add name {node.name} type veth peer name {world.LINK} netns {pid}
link set dev {node.name} master {world.LINK} up
""")
    _ip(world.addressed(node), node)


def lead(subnets: Mapping[Node, str]) -> None:
    """Make each node route packets for another node's pods to that node."""
    for node in subnets:
        others = [(other, subnet) for other, subnet in subnets.items() if other != node]
        _ip("".join(f"route add {subnet} via {other.address}\n" for other, subnet in others), node)


def _ip(commands: str, node: Node | None = None) -> None:
    words = ["ip", "-batch", "-"]
    command = node.command(words) if node else words
    subprocess.run(command, input=commands, text=True, check=True)


def main(arguments: Sequence[str]) -> None:
    """Make the node's mounts and run its registry, until this is killed with the whole cluster."""
    name, number, image_dir = arguments
    node = Node(Paths(name), int(number))
    node.place.mkdir()
    socket.sethostname(node.name)
    world.mount(node.place, Path(image_dir))
    world.loopback()
    images.serve(REGISTRY, node.place / "registry")
    _sign(node).touch()
    threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1:])
