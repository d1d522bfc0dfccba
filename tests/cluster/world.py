# SPDX-License-Identifier: Apache-2.0
"""The node's own view of the machine: mounts and network, in namespaces that end with the cluster."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.cluster.components import NODE_ADDRESS
from tests.cluster.paths import ROOT, TEMPLATES

#: Nothing that is mounted, listens or is linked in these outlives the last process.
NAMESPACES = ("unshare", "--mount", "--ipc", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")
_IMAGES = Path("/var/lib/infranetes/guest")
# kubelet insists on these and would set them for the whole machine; it finds files of ours instead.
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


def enter(place: Path, image_dir: Path) -> None:
    """Give this process, in namespaces of its own, the node's mounts and network."""
    _mount(place, image_dir)
    _network()


def _mount(place: Path, image_dir: Path) -> None:
    """Programs find the paths that they have on every node, and write to `place`."""
    library = place / "var-lib"
    TEMPLATES.mkdir(mode=0o700, parents=True, exist_ok=True)
    for source, target in (
        (image_dir.resolve(), library / "infranetes/guest"),
        (TEMPLATES, library / "infranetes/qemu/templates"),
    ):
        target.mkdir(parents=True)
        _run("mount", "--bind", source, target)
    for needed in (ROOT, Path(sys.prefix)):  # the checkout may be below /var/lib
        if needed.is_relative_to("/var/lib"):
            target = library / needed.relative_to("/var/lib")
            target.mkdir(parents=True, exist_ok=True)
            _run("mount", "--rbind", needed, target)
    (library / "infranetes").chmod(0o711)  # QEMU runs as a user of its own
    log = place / "var-log"
    log.mkdir()
    _run("mount", "--rbind", library, "/var/lib")
    _run("mount", "--bind", log, "/var/log")
    _run("mount", "-t", "tmpfs", "-o", "mode=755", "run", "/run")
    kernel = place / "kernel"
    kernel.mkdir()
    for name, value in KERNEL.items():
        file = kernel / name.replace("/", ".")
        file.write_text(f"{value}\n")
        _run("mount", "--bind", file, Path("/proc/sys") / name)


def _network() -> None:
    """Loopback, and an interface with the node's address. There is no way out."""
    commands = f"""\
link set dev lo up
link add name node0 type bridge
address add {NODE_ADDRESS}/24 dev node0
link set dev node0 up
route add default dev node0
"""
    subprocess.run(["ip", "-batch", "-"], input=commands, text=True, check=True)


def mounted_below(directory: Path) -> list[str]:
    """The mount points there, as this process sees them."""
    points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return [point for point in points if Path(point).is_relative_to(directory)]


def links() -> list[str]:
    """The network interfaces that this process sees."""
    shown = subprocess.run(["ip", "-j", "link"], capture_output=True, check=True).stdout
    return [link["ifname"] for link in json.loads(shown)]
