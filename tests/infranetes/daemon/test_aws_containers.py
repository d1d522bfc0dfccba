# SPDX-License-Identifier: Apache-2.0
"""Real containers in instances of a simulated EC2: the cloud's identity, metadata service and notices."""

from __future__ import annotations

from pathlib import Path

from infranetes_common.concurrency import start
from infranetes_common.wire import cri
from tests.harness.durations import slow
from tests.harness.needs import needs_netns
from tests.infranetes.daemon.cloud import CloudDaemonCase
from tests.support.clouds.aws_machines import SimulatedAwsMachines

ASK = "echo | nc 169.254.169.254 80 && echo open || echo closed"


@slow(8, "an instance boots as a machine of its own, at a simulated cloud")
@needs_netns
class ContainerTests(CloudDaemonCase):
    """Each instance is a machine of its own."""

    provider = "aws"
    make_world = SimulatedAwsMachines
    patience = 3.0

    async def output(self, container: str, end: str = "the end") -> list[str]:
        asked = cri.ContainerStatusRequest(container_id=container)
        status = (await self.runtime.ContainerStatus(asked, timeout=20.0)).status
        log = Path(status.log_path)
        await self.until(lambda: log.exists() and end in log.read_text(), f"the log says {end}")
        return [line.split(" ", 3)[3] for line in log.read_text().splitlines()]

    async def test_a_container_is_in_its_instance_and_can_not_read_the_identity(self) -> None:
        await self.start()
        sandbox = await self.run_pod(hostname="web-0")
        script = f"hostname; hostname -i; {ASK}; echo the end; sleep 1000"
        container = await self.run_container(sandbox, self.box(script=script))
        [instance] = self.world.instances()
        said = await self.output(container)
        self.assertEqual([line for line in said if not line.startswith("nc: ")],
                         ["web-0", instance["PrivateIpAddress"], "closed", "the end"])  # fmt: skip
        await self.restart()
        await self.in_state(container, cri.CONTAINER_RUNNING)
        request = cri.ExecSyncRequest(container_id=container, cmd=["hostname"], timeout=10)
        self.assertEqual((await self.runtime.ExecSync(request, timeout=20.0)).stdout, b"web-0\n")
        await self.stop_pod(sandbox)
        await self.nothing_is_left()
        await self.remove_pod(sandbox)

    async def test_an_instance_whose_metadata_service_is_down_is_a_pod_once_that_is_back(self) -> None:
        self.world.imds.silent = "all"
        await self.start()
        running = start(self.run_pod())
        await self.until(lambda: self.world.imds.asked, "the instance asks for its identity")
        self.world.imds.silent = ""
        sandbox = await running
        self.assertEqual([each.state for each in await self.sandboxes()], [cri.SANDBOX_READY])
        await self.remove_pod(sandbox)

    async def test_a_spot_instance_that_is_to_be_taken_away_stops_its_containers_with_grace(self) -> None:
        await self.start()
        sandbox = await self.run_pod(annotations={"infranetes.io/spot": "true"})
        script = "trap 'echo saved; echo the end; exit 0' TERM; echo begun; while true; do sleep 0.1; done"
        container = await self.run_container(sandbox, self.box(script=script))
        await self.output(container, "begun")
        notice = b'{"action": "terminate", "time": "2199-01-01T00:00:00Z"}'
        self.world.imds.documents["meta-data/spot/instance-action"] = notice

        async def not_ready() -> None:
            while [each.state for each in await self.sandboxes()] != [cri.SANDBOX_NOTREADY]:
                await self.sleep(0.1)

        await not_ready()
        await self.in_state(container, cri.CONTAINER_RUNNING)
        stop = cri.StopContainerRequest(container_id=container, timeout=20)
        await self.runtime.StopContainer(stop, timeout=60.0)  # as kubelet does
        self.assertEqual(await self.output(container), ["begun", "saved", "the end"])
        await self.remove_pod(sandbox)
