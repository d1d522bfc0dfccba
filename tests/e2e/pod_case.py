# SPDX-License-Identifier: Apache-2.0
"""What tests of pods on real VMs share: the daemon as a process, QEMU, and the guest image's agent."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from infranetes.guest.image import DEFAULT_DIR, current
from infranetes.providers.qemu.network.bridge import Bridge
from infranetes_common.errors import FailedPrecondition
from infranetes_common.wire import cri
from tests.e2e.pod_network import pod_network
from tests.harness.durations import slow
from tests.infranetes.daemon.case import DaemonCase, reactor
from tests.support.keeping import keeping

IMAGES = os.environ.get("INFRANETES_TEST_IMAGES", str(DEFAULT_DIR))
DOCKER_ALONE = f"{IMAGES}-docker"  # made by `make image-docker`
# The node's default ContainerProvider; empty: the first of the guest image.
CONTPROVIDER = os.environ.get("INFRANETES_TEST_CONTPROVIDER", "")
# All tests share one template, and so does the next run, because a boot takes minutes without KVM.
TEMPLATES = os.environ.get("INFRANETES_TEST_TEMPLATES", "/var/lib/infranetes/test-templates")


def templates_of(variant: str) -> str:
    """Return the directory of the templates of VMs that are unlike those of most tests.

    A directory keeps the three that were used last; with a few variants in it, tests that run side by side
    would take the shared one away from each other.
    """
    return f"{TEMPLATES}-{variant}"


def providers(images: str) -> tuple[str, ...]:
    """Return the ContainerProviders in the current one of these guest images, the default first."""
    try:
        return current(Path(images)).providers
    except FailedPrecondition:
        return ()


@slow(40, "its VMs are emulated where there is no KVM")
class PodCase(DaemonCase):
    """A test case with the daemon as a process, and QEMU.

    :cvar images: the directory of the guest images. :cvar contprovider: the node's default.
    """

    timeout = 1500
    patience = 10.0  # the template may have to be booted first, and everything is slow without KVM
    images = IMAGES
    contprovider = CONTPROVIDER

    def setUp(self) -> None:
        super().setUp()
        self.network = pod_network()
        self.config["provider"] = "qemu"
        self.config["contprovider"] = self.contprovider
        if keeping():
            self.config["control"] = {"enter": True}
        self.config["providers"] = {
            "qemu": {
                "bridge": self.network.bridge,
                "pod_cidr": self.network.subnet,
                "image_dir": self.images,
                "template_dir": templates_of("docker") if self.images == DOCKER_ALONE else TEMPLATES,
            }
        }

    def ways_in(self) -> Iterable[str]:
        """Return commands for the daemon and its VMs."""
        for way in super().ways_in():
            yield way.replace("console POD", "console POD, enter POD")

    async def end_everything(self) -> None:
        try:
            if self.alive:
                for sandbox in await self.sandboxes():
                    await self.stop_pod(sandbox.id)
                    await self.remove_pod(sandbox.id)
        finally:
            await super().end_everything()
            await Bridge(reactor, self.network.bridge, 0).remove()

    def taps(self) -> str:
        """Return the VMs' taps on the node: each QEMU has one, which ends with it."""
        command = ["ip", "-o", "link", "show", "master", self.network.bridge]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def lines(self, name: str) -> list[str]:
        """Return the lines of a container's log, without times and tags, with lines in parts joined."""
        log = (self.log_directory / "web" / f"{name}.log").read_text()
        parts: dict[str, str] = {}
        found = []
        for line in log.splitlines():
            self.assertRegex(line, r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{9}Z (stdout|stderr) [PF] ")
            _, stream, tag, text = line.split(" ", 3)
            parts[stream] = parts.get(stream, "") + text
            if tag == "F":
                found.append(parts.pop(stream))
        return found + list(parts.values())

    def has_lines(self, count: int) -> bool:
        return len(self.lines("main")) >= count

    async def execute(self, container: str, *command: str) -> Any:
        seconds = int(30 * self.patience)
        request = cri.ExecSyncRequest(container_id=container, cmd=command, timeout=seconds)
        return await self.runtime.ExecSync(request, timeout=seconds + 30.0)
