# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.cluster`: keeps a Kubernetes up until Ctrl-C, and leaves nothing of it."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

from infranetes.providers.qemu.settings import ACCELERATORS
from tests.cluster import images, remains
from tests.cluster.components import CLOUD, CONTAINERD, INFRANETES, MIXED, RUNTIMES
from tests.cluster.nodes import NAMESPACES as OF_ONE_NODE
from tests.cluster.nodes import Node
from tests.cluster.paths import PROGRAMS, REGISTRY, ROOT, Paths
from tests.cluster.remains import Namespaces
from tests.cluster.supervisor import say
from tests.cluster.world import NAMESPACES

IMAGE_DIR = "/var/lib/infranetes/guest"
END_SECONDS = 20
MAX_NODES = 9  # as many as one machine can carry


def options(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.cluster", description=__doc__)
    parser.add_argument("--name", default="own", help="of several clusters of one checkout (%(default)s)")
    parser.add_argument(
        "--provider", default="qemu", help=f"what makes the machines; {CLOUD}: simulated ones (%(default)s)"
    )
    parser.add_argument("--nodes", type=int, choices=range(1, MAX_NODES + 1), default=1, help="(%(default)s)")
    parser.add_argument("--runtime", choices=RUNTIMES, default=INFRANETES, help="of kubelet (%(default)s)")
    parser.add_argument("--accelerator", choices=ACCELERATORS, default="auto", help="of QEMU (%(default)s)")
    parser.add_argument("--proxy", action="store_true", help="with kube-proxy")
    parser.add_argument("--policies", action="store_true", help="with NetworkPolicies")
    parser.add_argument("--storage", action="store_true", help="with volumes of pods' own")
    parser.add_argument(
        "--pinning", action="store_true", help="with kubelet's static CPU and memory managers"
    )
    parser.add_argument("--ssh", action="store_true", help="with an sshd, by which kubelet may be stopped")
    parser.add_argument("--image-dir", default=IMAGE_DIR, help="of guest images (%(default)s)")
    parser.add_argument("--until", type=int, default=0, metavar="PID", help="end with that process")
    given = parser.parse_args(arguments)
    if given.nodes > 1 and given.runtime != INFRANETES:
        parser.error(f"several nodes have {INFRANETES}")
    if given.storage and (given.nodes > 1 or given.runtime == CONTAINERD):
        parser.error("volumes are a node's own, and its VMs'")
    if given.policies and given.runtime == MIXED:
        parser.error("on a mixed node policies are the CNI's")
    if given.pinning and os.cpu_count() == 1:
        parser.error("of one processor none is left for pods")
    return given


class Keeper:
    """Runs the cluster in namespaces of its own, from outside of them, and cleans up after it."""

    def __init__(self, paths: Paths, given: argparse.Namespace) -> None:
        self.paths = paths
        self.given = given
        self._ending = False
        self._first = 0  # process 1 of the cluster

    def run(self) -> int:
        """Run the cluster; return the exit code, which is 0 unless the cluster failed or left something."""
        remains.remove(self.paths)
        images.make(REGISTRY, say)
        self._prepare()
        code = 1
        try:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, self._end)
            if self.given.until:
                threading.Thread(target=self._end_with, args=(self.given.until,), daemon=True).start()
            code = self._kept()
        finally:
            remains.remove(self.paths)
        return code

    def _prepare(self) -> None:
        self.paths.place.mkdir(mode=0o755)
        shutil.rmtree(self.paths.logs, ignore_errors=True)
        self.paths.logs.mkdir(parents=True)

    def _kept(self) -> int:
        given = self.given
        words = [self.paths.name, given.image_dir, given.provider, "--nodes", str(given.nodes)]
        words += [
            f"--{name}" for name in ("proxy", "policies", "storage", "pinning", "ssh") if getattr(given, name)
        ]
        words += ["--runtime", given.runtime, "--accelerator", given.accelerator]
        command = [
            *("setpriv", "--pdeathsig", "KILL", "--", *NAMESPACES),  # when killed, ends the whole cluster
            *(sys.executable, "-m", "tests.cluster.supervisor", *words),
        ]
        inner = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL,
            start_new_session=True,  # so that Ctrl-C reaches only this process
        )  # fmt: skip
        self._first = remains.child_of(inner.pid)
        remains.note(self.paths, self._first)
        with contextlib.ExitStack() as stack:
            held = stack.enter_context(Namespaces(self._first)) if self._first else None
            self._write_scripts()
            code = self._ended(inner)
            left = held.processes() if held else []
        if left:
            say("left behind: " + ", ".join(left))
        return code or (1 if left else 0)

    def _ended(self, inner: subprocess.Popen[bytes]) -> int:
        asked = 0
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return inner.wait(1)
            if self._ending:
                asked += 1
                # This is repeated, because process 1 may not have handled the signal yet.
                self._signal(signal.SIGTERM if asked < END_SECONDS else signal.SIGKILL)

    def _end(self, number: int, frame: FrameType | None) -> None:
        self._ending = True
        self._signal(signal.SIGTERM)

    def _signal(self, number: int) -> None:
        if self._first:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._first, number)

    def _end_with(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(pid)
            select.select([descriptor], [], [])
        os.kill(os.getpid(), signal.SIGTERM)

    def _write_scripts(self) -> None:
        place, programs = self.paths.place, ROOT / "build" / "tools"
        search = f"{PROGRAMS}:{programs}:{Path(sys.executable).parent}"
        self._script(
            self.paths.kubectl,
            f"--net -- env KUBECACHEDIR='{place}/tmp/kubectl' KUBECONFIG='{place}/pki/admin.conf' "
            f"PATH=\"{search}:$PATH\" '{PROGRAMS}/kubectl'",  # where kubectl finds its plug-in
        )
        inside = '--mount --ipc --net --uts --pid --wdns="$PWD" --'
        environment = (
            f'env PATH="{search}:$PATH" CRI_CONFIG_FILE=/dev/null '
            "CONTAINER_RUNTIME_ENDPOINT=unix:///run/infranetes/infranetes.sock"
        )
        self._script(self.paths.inside, f"{inside} {environment}")
        for number in range(2, self.given.nodes + 1):
            node = Node(self.paths, number)
            pid = f"$(cat '{self.paths.pid(node.name)}')"  # as it is inside
            there = f'nsenter --target "{pid}" {" ".join(OF_ONE_NODE)} --wdns="$PWD" --'
            self._script(self.paths.inside_of(node.name), f"{inside} {there} {environment}")

    def _script(self, path: Path, words: str) -> None:
        path.write_text(f'#!/bin/sh\nexec nsenter --target {self._first} {words} "$@"\n')
        path.chmod(0o755)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock. :raise BlockingIOError: another process holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def main(arguments: Sequence[str]) -> int:
    """Run the program, and return its exit code."""
    given = options(arguments)
    paths = Paths(given.name)
    if os.geteuid():
        say("A cluster needs root: sudo make cluster")
        return 1
    try:
        with locked(paths.kept / "lock"):
            return Keeper(paths, given).run()
    except BlockingIOError:
        say(f"A cluster called {given.name} of this checkout is running; {paths.kubectl} is its kubectl.")
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
