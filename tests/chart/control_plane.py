# SPDX-License-Identifier: Apache-2.0
"""A control plane, a registry for all names, kubectl and helm, in a network of their own."""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path

from infranetes_common import __version__
from tests.cluster import components
from tests.cluster.case import until
from tests.cluster.components import NODE_ADDRESS, Program
from tests.cluster.paths import PROGRAMS, ROOT
from tests.cluster.pki import Authority
from tests.contrib.rendered import HELM
from tests.interop.critest_images import PAUSE
from tests.support import oci
from tests.support.registry import Registry
from tests.support.spaces import Space

READY_SECONDS = 180.0
END_SECONDS = 20.0
#: What the chart asks for, without the registries' names.
NODE_IMAGE, TEST_IMAGE = ("infranetes", __version__), ("e2e-test-images/busybox", "1.36.1-1")
_LINK = "eth0"  # a bridge, as not every kernel has dummies
_PORT = 5000


class ControlPlane:
    """etcd, the API server, the controller manager and the scheduler; `end` ends all of it.

    :ivar space: the network, in which the node is too, at the address that the certificates are for.
    :ivar ca: the cluster's. :ivar registry: where containerd finds all images, whatever their registry.
    :param place: a directory for its files.
    """

    def __init__(self, place: Path) -> None:
        self._place = place
        self._running: list[subprocess.Popen[bytes]] = []
        self._undo = contextlib.ExitStack()
        self.space = Space("chart")
        self._undo.callback(self.space.end)
        self._undo.callback(self._end_programs)
        self.ca = Authority(place / "pki")
        self._admin = self.ca.kubeconfig("admin", components.API_SERVER, ["system:masters"])
        (place / "registry").mkdir()
        self.registry = Registry(root=place / "registry", port=_PORT)
        self._undo.callback(self.registry.stop)

    def start(self, image: Path) -> None:
        """Start everything; return when the API server answers.

        :param image: the OCI archive that nodes install from."""
        self.space.ip(
            f"link add name {_LINK} type bridge",
            f"address add {NODE_ADDRESS}/24 dev {_LINK}",
            f"link set {_LINK} up",
            f"route add default dev {_LINK}",
        )
        self._start(components.etcd(self._place))
        self._start(components.api_server(self.ca))
        self.space.inside(self._fill_registry)
        name, tag = NODE_IMAGE
        pushed = f"docker://{self.registry.host}/{name}:{tag}"
        self.said("skopeo", "copy", "--dest-tls-verify=false", f"oci-archive:{image}", pushed)
        self._until_ready()
        self._start(components.controller_manager(self.ca))
        self._start(components.scheduler(self.ca))

    def _fill_registry(self) -> None:
        self.registry.start()
        self.registry.push(*PAUSE, oci.busybox({"Cmd": ["sleep", "2147483647"]}))
        self.registry.push(*TEST_IMAGE, oci.busybox())

    def _until_ready(self) -> None:
        try:
            ready = ("get", "--raw=/readyz")
            until(lambda: self.kubectl(*ready).returncode == 0, "the API server is ready", READY_SECONDS)
        except AssertionError as error:
            logs = (f"{path.name}: {path.read_text()[-2000:]}" for path in self._place.glob("*.log"))
            raise AssertionError("\n".join((str(error), *logs))) from None

    def _start(self, program: Program) -> None:
        with (self._place / f"{program.name}.log").open("ab") as log:
            command = self.space.command(*map(str, program.command))
            started = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self._running.append(started)

    def _end_programs(self) -> None:
        for process in self._running:
            process.kill()
        for process in self._running:
            process.wait(END_SECONDS)

    def run(self, *words: str | Path, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        """Run a program in its network; `stdout` has output and errors together. `timeout`: in seconds."""
        return subprocess.run(
            self.space.command(*map(str, words)),
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
        )

    def said(self, *words: str | Path, timeout: float = 300) -> str:
        """Run a program in its network, which has to succeed; return what it says."""
        done = self.run(*words, timeout=timeout)
        if done.returncode:
            raise AssertionError(f"{' '.join(map(str, words))}: {done.stdout}")
        return done.stdout

    def kubectl(self, *words: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        """Run kubectl as the administrator."""
        flags = (f"--kubeconfig={self._admin}", f"--cache-dir={self._place / 'kubectl'}")
        return self.run(PROGRAMS / "kubectl", *flags, *words, timeout=timeout)

    def helm(self, *words: str | Path, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        """Run helm as the cluster's administrator, with a home directory of its own."""
        home = ("env", f"HOME={self._place / 'home'}", f"KUBECONFIG={self._admin}")
        return self.run(*home, HELM, *words, timeout=timeout)

    def end(self) -> None:
        """End all programs, and remove the network. Nothing else may run in it."""
        self._undo.close()
