# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.cluster.reboot`, where a node is: what ends when its machine is switched off, ends.

The control plane is the cluster's, and goes on, as it would elsewhere. What a kernel forgets is taken away:
/run, mounts of pods' volumes, bridges and rules. The supervisor starts the node's programs afterwards."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from tests.cluster import world
from tests.cluster.paths import Paths

#: What runs on a node; all else that the supervisor has started is the cluster's.
PROGRAMS = ("kubelet", "infranetes", "containerd", "kube-proxy")
SECONDS = 20.0


def parents() -> Mapping[int, int]:
    """Each process here, and its parent; without what has ended and was not waited for."""
    found = {}
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdigit() and os.path.realpath(f"/proc/{name}/exe") != f"/proc/{name}/exe":
                stat = Path(f"/proc/{name}/stat").read_text()
                found[int(name)] = int(stat.rpartition(")")[2].split()[1])
    return found


def staying(paths: Paths, known: Mapping[int, int]) -> set[int]:
    """The processes that are no node's: the control plane's, and who asks."""
    supervisor = int(paths.pid("supervisor").read_text())
    node = {int(paths.pid(name).read_text()) for name in PROGRAMS if paths.pid(name).exists()}
    stay = {1, supervisor, os.getpid(), os.getppid()}
    grown = True
    while grown:
        more = {pid for pid, parent in known.items() if parent in stay - {1} and pid not in node} - stay
        stay |= more
        grown = bool(more)
    return stay


def kill(paths: Paths) -> None:
    """End every process of the node. :raise TimeoutError: some go on."""
    until = time.monotonic() + SECONDS
    while True:
        known = parents()
        ending = known.keys() - staying(paths, known)
        if not ending:
            return
        if time.monotonic() > until:
            raise TimeoutError(f"these processes don't end: {sorted(ending)}")
        for pid in ending:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def unmount(directory: Path) -> None:
    """Take away what is mounted below it; not what lies under a mount, and can't be reached."""
    for point in sorted(world.mounted_below(directory), reverse=True):
        if Path(point) != directory:
            subprocess.run(["umount", "--lazy", point], check=False, stderr=subprocess.DEVNULL)


def empty(directory: Path) -> None:
    """Take away what is in it. :raise OSError: something is in use."""
    unmount(directory)
    for path in directory.iterdir():
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def main(name: str) -> None:
    """The whole program. `name`: the cluster's."""
    paths = Paths(name)
    kill(paths)
    unmount(Path("/var/lib/kubelet"))
    empty(Path("/run"))
    subprocess.run(["nft", "flush", "ruleset"], check=True)
    for link in world.links():
        if link not in ("lo", world.LINK):
            # Another may have gone with the one before.
            subprocess.run(["ip", "link", "delete", link], check=False)


if __name__ == "__main__":
    main(sys.argv[1])
