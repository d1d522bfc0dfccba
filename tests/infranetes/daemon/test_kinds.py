# SPDX-License-Identifier: Apache-2.0
"""Pods of containers and pods that are machines side by side, through the CRI of a daemon that is a process.

The former are simulated VMs, the latter VMs of a simulated EC2: there are two providers.
"""

from __future__ import annotations

from typing import Any

from infranetes_common.wire import cri
from tests.harness.durations import slow
from tests.harness.needs import needs_systemd
from tests.infranetes.daemon.cloud import CloudDaemonCase
from tests.support.clouds.aws import SimulatedAws
from txgrpc import Code

MACHINE = "aws.infranetes.io/web:1.0"


@slow(6, "VMs of two kinds boot, of which one is a machine of its own")
@needs_systemd
class SideBySideTests(CloudDaemonCase):
    """The runtime handler `appliance` beside the node's own."""

    provider = "aws"
    make_world = SimulatedAws

    def setUp(self) -> None:
        super().setUp()
        tables = {**self.config["providers"], "simulated": {"boot_seconds": 0.05, "jitter_seconds": 0.0}}
        self.config.update(
            provider="simulated",
            providers=tables,
            handlers={"appliance": {"provider": "aws", "images": "machine"}},
        )

    async def run_appliance(self) -> str:
        (self.log_directory / "appliance").mkdir()
        request = cri.RunPodSandboxRequest(config=self.pod("appliance"), runtime_handler="appliance")
        return str((await self.runtime.RunPodSandbox(request, timeout=60.0)).pod_sandbox_id)

    async def output(self, container: str) -> bytes:
        request = cri.ExecSyncRequest(container_id=container, cmd=["sh", "-c", "echo there"], timeout=20)
        return bytes((await self.runtime.ExecSync(request, timeout=30.0)).stdout)

    async def test_both_live_are_kept_by_the_next_daemon_and_end(self) -> None:
        await self.world.machine_image("web:1.0")
        await self.start()
        pulling = cri.PullImageRequest(image=cri.ImageSpec(image=MACHINE))
        image = cri.ImageSpec(image=(await self.image_service.PullImage(pulling, timeout=30.0)).image_ref)
        listed = (await self.image_service.ListImages(cri.ListImagesRequest(), timeout=10.0)).images
        self.assertEqual(len(listed), 2)
        sandbox, appliance = await self.run_pod(), await self.run_appliance()
        self.assertEqual((len(await self.vms()), self.world.seen()), (1, []))
        machine: Any = self.box(image=image)
        said = await self.refused(Code.INVALID_ARGUMENT, self.create(sandbox, machine))
        self.assertIn("are made of containers", said)
        said = await self.refused(Code.INVALID_ARGUMENT, self.create(appliance))
        self.assertIn("are made of machine images of provider aws", said)
        made = [await self.run_container(sandbox), await self.run_container(appliance, machine)]
        self.assertEqual((len(await self.vms()), len(self.world.seen())), (1, 1))
        await self.restart()
        for container in made:
            await self.in_state(container, cri.CONTAINER_RUNNING)
        self.assertEqual(await self.output(made[1]), b"there\n")
        status = await self.runtime.Status(cri.StatusRequest(verbose=True), timeout=10.0)
        conditions = {each.type: each.status for each in status.status.conditions}
        self.assertTrue(conditions["InfranetesProvider/simulated"] and conditions["InfranetesProvider/aws"])
        for id in (sandbox, appliance):
            await self.stop_pod(id)
            await self.remove_pod(id)
        self.assertEqual(await self.vms(), [])
        await self.nothing_is_left()
