# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.cluster.reboot`, run on a node: ends all that ends when its machine is switched off.

The control plane belongs to the cluster and goes on, as it would on another machine. Everything that a kernel
forgets is removed: /run, mounts of pods' volumes, bridges and rules. Then the supervisor starts the node's
programs."""

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

#: The programs of a node; all others that the supervisor has started belong to the cluster.
PROGRAMS = ("kubelet", "infranetes", "containerd", "kube-proxy")
SECONDS = 20.0


def parents() -> Mapping[int, int]:
    """Return the parent of each process of this PID namespace, without zombies."""
    found = {}
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdigit() and os.path.realpath(f"/proc/{name}/exe") != f"/proc/{name}/exe":
                stat = Path(f"/proc/{name}/stat").read_text()
                found[int(name)] = int(stat.rpartition(")")[2].split()[1])
    return found


def staying(paths: Paths, known: Mapping[int, int]) -> set[int]:
    """Return the processes that go on: the supervisor, the control plane, this one and its parent."""
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
    """Kill every process of the node. :raise TimeoutError: some still run."""
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
    """Unmount everything below the directory, except what a mount hides, which can't be reached."""
    for point in sorted(world.mounted_below(directory), reverse=True):
        if Path(point) != directory:
            subprocess.run(["umount", "--lazy", point], check=False, stderr=subprocess.DEVNULL)


def empty(directory: Path) -> None:
    """Remove the content of the directory. :raise OSError: something is in use."""
    unmount(directory)
    for path in directory.iterdir():
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def main(name: str) -> None:
    """Run the program. :param name: the cluster's."""
    paths = Paths(name)
    kill(paths)
    unmount(Path("/var/lib/kubelet"))
    empty(Path("/run"))
    subprocess.run(["nft", "flush", "ruleset"], check=True)
    for link in world.links():
        if link not in ("lo", world.LINK):
            # This link may have gone together with one before it.
            subprocess.run(["ip", "link", "delete", link], check=False)


if __name__ == "__main__":
    main(sys.argv[1])
