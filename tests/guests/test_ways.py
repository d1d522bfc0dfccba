# SPDX-License-Identifier: Apache-2.0
"""Pods that are guests of whole systems: commands by SSH, by QEMU's guest agent, and by our agent."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from infranetes_common.wire import cri
from tests.e2e.image_case import ImagePodCase
from tests.guests import catalogue
from tests.harness.durations import slow
from tests.harness.needs import needs_guests, needs_vms, nightly
from txgrpc import GrpcError

BOOT_SECONDS = 1500.0  # of Debian, emulated, on a machine that is busy with other work
GUEST = "infranetes.io/guest"


@nightly
@needs_vms
@slow(400, "it boots Debian, which is emulated where there is no KVM")
class WaysTests(ImagePodCase):
    timeout = 3600

    async def guest_of(
        self, image: str, annotations: Mapping[str, str], labels: Mapping[str, str] | None = None
    ) -> tuple[str, str]:
        """Run a pod of an image, and wait until a command runs in it. Return the ids of both."""
        await self.start()
        name = image.partition(".")[0]
        reference = await self.pulled(name, catalogue.path(image), labels)
        sandbox = await self.run_pod(hostname="web-0", annotations=annotations)
        container = await self.run_container(sandbox, self.guest(reference))
        await self.until_reached(container)
        return sandbox, container

    async def until_reached(self, container: str) -> None:
        deadline = time.monotonic() + BOOT_SECONDS
        while True:
            try:
                await self.ran(container, "true")
                return
            except GrpcError as error:
                if time.monotonic() > deadline:
                    self.fail(f"{error}\n{self.console()[-3000:]}")
            await self.sleep(2.0)

    async def ran(self, container: str, *command: str) -> Any:
        request = cri.ExecSyncRequest(container_id=container, cmd=command, timeout=60)
        return await self.runtime.ExecSync(request, timeout=120.0)

    async def check(self, sandbox: str, container: str) -> None:
        """Check commands, also with the next daemon, usage, and the end that a stop asks for."""
        for daemon in ("one", "next"):
            script = "echo out; echo err >&2; id -u; exit 7"
            answer = await self.ran(container, "sh", "-c", script)
            self.assertEqual(
                (answer.exit_code, answer.stdout, answer.stderr), (7, b"out\n0\n", b"err\n"), daemon
            )
            if daemon == "one":
                await self.restart()
        address = await self.address(sandbox)
        self.assertIn(address, (await self.ran(container, "ip", "-4", "addr")).stdout.decode())
        stop = cri.StopContainerRequest(container_id=container, timeout=240)
        await self.runtime.StopContainer(stop, timeout=300.0)
        status = await self.container_status(container)
        self.assertEqual((status.state, status.exit_code), (cri.CONTAINER_EXITED, 0))

    @needs_guests("debian-ssh.qcow2")
    async def test_by_ssh_alone(self) -> None:
        sandbox, container = await self.guest_of("debian-ssh.qcow2", {GUEST: "ssh"})
        await self.check(sandbox, container)

    @needs_guests("debian-agent.qcow2")
    async def test_by_the_guest_agent_alone(self) -> None:
        sandbox, container = await self.guest_of("debian-agent.qcow2", {GUEST: "guest-agent"})
        await self.check(sandbox, container)

    @needs_guests("infranetes.qcow2")
    async def test_by_our_agent(self) -> None:
        labels = {"io.infranetes.agent": "true"}
        _, container = await self.guest_of("infranetes.qcow2", {}, labels)
        answer = await self.ran(container, "sh", "-c", "hostname; exit 3")
        self.assertEqual((answer.exit_code, answer.stdout), (3, b"web-0\n"))
