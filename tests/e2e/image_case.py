# SPDX-License-Identifier: Apache-2.0
"""What tests of pods share that boot images without our agent: a registry of such images, and consoles."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from twisted.internet.threads import deferToThread

from infranetes_common.wire import cri
from tests.e2e.pod_case import PodCase
from tests.harness.needs import TOOLS
from tests.support import oci
from tests.support.registry import Registry


class ImagePodCase(PodCase):
    """A daemon whose pods boot the disks of a registry's images."""

    def setUp(self) -> None:
        super().setUp()
        self.config["imgprovider"] = "qemu"
        self.registry = Registry()
        self.addCleanup(self.registry.stop)

    async def start(self, *flags: str, crash: tuple[str, int] | None = None) -> None:
        if not self.registry.port:
            await deferToThread(self.registry.start)
        self.config["images"] = {"insecure_registries": [self.registry.host]}
        await super().start(*flags, crash=crash)

    async def pulled(self, name: str, disk: Path, labels: Mapping[str, str] | None = None) -> str:
        """Push an image with this disk to the registry, and have the node pull it; return its reference."""
        layer = await deferToThread(oci.layer, {f"disk/{disk.name}": disk.read_bytes()})
        built = await deferToThread(oci.image, [layer], compression="", labels=labels)
        reference = str(await deferToThread(self.registry.push, name, "1", built))
        request = cri.PullImageRequest(image=cri.ImageSpec(image=reference))
        await self.image_service.PullImage(request, timeout=300.0)
        return reference

    def guest(self, image: str, name: str = "main", **fields: Any) -> cri.ContainerConfig:
        """Return a container that is a guest of this image."""
        config: cri.ContainerConfig = self.box(name, image=cri.ImageSpec(image=image), **fields)
        return config

    def console(self, name: str = "main") -> str:
        """Return the log of a container, which is the console of its guest, without times."""
        path = self.log_directory / "web" / f"{name}.log"
        if not path.exists():
            return ""
        return re.sub(r"(?m)^\S+ (?:stdout|stderr) ([PF]) (.*)(\n?)", _line, path.read_text(errors="replace"))

    async def says(self, words: str, name: str = "main", seconds: float = 60.0) -> None:
        """Wait until the guest has written this to its console."""
        await self.until(lambda: words in self.console(name), f"the console has {words!r}", seconds)

    async def type_in(self, container: str, words: str) -> str:
        """Attach to the console, type this, and return what was shown until then."""
        endpoint = ("--runtime-endpoint", f"unix://{self.socket}")
        command = [str(TOOLS / "crictl"), *endpoint, "attach", "-i", container]
        screen = Path(self.mktemp())
        with screen.open("wb") as output:
            process = await deferToThread(
                subprocess.Popen, command, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT
            )
        assert process.stdin is not None
        process.stdin.write(words.encode())
        process.stdin.flush()
        last = words.split("\n")[-2].encode()
        with suppress(AssertionError):  # not everything echoes what is typed
            await self.until(lambda: last in screen.read_bytes(), "what was typed is shown", 20.0)
        await self.sleep(3.0)
        process.kill()
        await deferToThread(process.wait)
        process.stdin.close()
        return screen.read_bytes().decode(errors="replace")

    async def address(self, sandbox: str) -> str:
        """Return the address of a pod."""
        request = cri.PodSandboxStatusRequest(pod_sandbox_id=sandbox)
        return str((await self.runtime.PodSandboxStatus(request, timeout=10.0)).status.network.ip)


def _line(found: re.Match[str]) -> str:
    return found[2] + ("" if found[1] == "P" else found[3])
