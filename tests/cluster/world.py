# SPDX-License-Identifier: Apache-2.0
"""A node's own view of the machine: mounts and network, in namespaces that end with the cluster."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

from tests.cluster.nodes import Node
from tests.cluster.paths import ROOT, TEMPLATES

#: No mount, listener or link in these namespaces outlives their last process.
NAMESPACES = (
    *("unshare", "--mount", "--ipc", "--net", "--uts", "--pid"),
    *("--fork", "--kill-child", "--mount-proc"),
)
#: A node's interface in the nodes' network. The first node's is the bridge that the others join.
LINK = "node0"
# kubelet insists on these settings and would change them for the whole machine; it gets files of ours
# instead.
KERNEL = {
    "vm/overcommit_memory": 1,
    "vm/panic_on_oom": 0,
    "kernel/panic": 10,
    "kernel/panic_on_oops": 1,
    "kernel/keys/root_maxkeys": 1000000,
    "kernel/keys/root_maxbytes": 25000000,
}


def _run(*command: str | Path) -> None:
    subprocess.run([str(word) for word in command], check=True)


def enter(node: Node, image_dir: Path) -> None:
    """Give this process, in its own namespaces, the first node's name, mounts and network. Irreversible."""
    socket.sethostname(node.name)
    mount(node.place, image_dir)
    loopback()
    commands = f"link add name {LINK} type bridge\n{addressed(node)}"
    subprocess.run(["ip", "-batch", "-"], input=commands, text=True, check=True)


def mount(place: Path, image_dir: Path) -> None:
    """Mount what programs find at the paths that are the same on every node; they write to `place`."""
    library = place / "var-lib"
    TEMPLATES.mkdir(mode=0o700, parents=True, exist_ok=True)
    for source, target in (
        (image_dir.resolve(), library / "infranetes/guest"),
        (TEMPLATES, library / "infranetes/qemu/templates"),
    ):
        target.mkdir(parents=True)
        _run("mount", "--bind", source, target)
    temporary = place / "node-tmp"  # kept small, because pods mount it
    temporary.mkdir()
    temporary.chmod(0o1777)
    for top, own in (("/var/lib", library), ("/tmp", temporary)):
        for needed in (ROOT, Path(sys.prefix)):
            if needed.is_relative_to(top):  # the checkout may be below it
                target = own / needed.relative_to(top)
                target.mkdir(parents=True, exist_ok=True)
                _run("mount", "--rbind", needed, target)
    (library / "infranetes").chmod(0o711)  # QEMU, which runs as a user of its own, has to pass through
    log = place / "var-log"
    log.mkdir()
    _run("mount", "--rbind", library, "/var/lib")
    _run("mount", "--rbind", temporary, "/tmp")
    _run("mount", "--bind", log, "/var/log")
    _run("mount", "-t", "tmpfs", "-o", "mode=755", "run", "/run")
    kernel = place / "kernel"
    kernel.mkdir()
    for name, value in KERNEL.items():
        file = kernel / name.replace("/", ".")
        file.write_text(f"{value}\n")
        _run("mount", "--bind", file, Path("/proc/sys") / name)


def loopback() -> None:
    """Set up the loopback interface in this process's network."""
    _run("ip", "link", "set", "dev", "lo", "up")


def addressed(node: Node) -> str:
    """Return the command for ip(8) that gives LINK the node's address."""
    return f"""\
address add {node.address}/24 dev {LINK}
link set dev {LINK} up
route add default dev {LINK}
"""


def mounted_below(directory: Path) -> list[str]:
    """Return the mount points below the directory, as this process sees them."""
    points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return [point for point in points if Path(point).is_relative_to(directory)]


def links() -> list[str]:
    """Return the network interfaces that this process sees."""
    shown = subprocess.run(["ip", "-j", "link"], capture_output=True, check=True).stdout
    return [link["ifname"] for link in json.loads(shown)]
