# SPDX-License-Identifier: Apache-2.0
"""Pods that sleep, with a daemon as a process and simulated VMs."""

from __future__ import annotations

from typing import Any

from infranetes.ctl.cli import FAILED
from infranetes_common.wire import cri
from tests.harness.durations import slow
from tests.harness.needs import needs_registry
from tests.infranetes.daemon.ctl import CtlCase
from txgrpc import GrpcError


@needs_registry
class SleepTests(CtlCase):
    async def asleep(self, name: str = "web", **fields: Any) -> tuple[str, str]:
        """Return a pod that sleeps, and its container."""
        sandbox = await self.run_pod(name, **fields)
        container = await self.run_container(sandbox, self.box(script="exec sleep 1000"))
        self.assertIn(f"default/{name} sleeps", await self.ctl("sleep", name))
        return sandbox, container

    async def sleeps(self) -> bool:
        (vm,) = await self.vms()
        return bool(vm["behaviour"] == "asleep")

    async def assert_shown_running(self, sandbox: str, container: str) -> None:
        """Assert that kubelet sees a pod that runs, by whatever it asks."""
        (pod,) = (await self.runtime.ListPodSandbox(cri.ListPodSandboxRequest(), timeout=30.0)).items
        self.assertEqual((pod.id, pod.state), (sandbox, cri.SANDBOX_READY))
        (listed,) = (await self.runtime.ListContainers(cri.ListContainersRequest(), timeout=30.0)).containers
        self.assertEqual((listed.id, listed.state), (container, cri.CONTAINER_RUNNING))
        status = await self.runtime.ContainerStatus(
            cri.ContainerStatusRequest(container_id=container), timeout=30.0
        )
        self.assertEqual(status.status.state, cri.CONTAINER_RUNNING)
        stats = (await self.runtime.ListPodSandboxStats(cri.ListPodSandboxStatsRequest(), timeout=30.0)).stats
        self.assertEqual([each.attributes.id for each in stats], [sandbox])
        self.assertEqual(stats[0].linux.memory.working_set_bytes.value, 0)
        self.assertTrue(await self.sleeps(), "nothing of this wakes it")

    async def echo(self, container: str) -> bytes:
        request = cri.ExecSyncRequest(container_id=container, cmd=["echo", "on"], timeout=60)
        return bytes((await self.runtime.ExecSync(request, timeout=90.0)).stdout)

    @slow(6, "it kills daemons")
    async def test_kubelet_sees_it_running_and_a_command_wakes_it_also_after_a_killed_daemon(self) -> None:
        await self.start()
        sandbox, container = await self.asleep()
        await self.assert_shown_running(sandbox, container)
        await self.restart()
        await self.assert_shown_running(sandbox, container)
        self.assertEqual(await self.echo(container), b"on\n")
        self.assertFalse(await self.sleeps())
        self.assertIn("was awake", await self.ctl("wake", "web"))
        self.assertGreater((await self.json("sleep", "web"))["bytes"], 0)
        self.assertTrue((await self.json("wake", "web"))["slept"])
        self.assertEqual(await self.echo(container), b"on\n")
        words = await self.ctl("describe", "web")
        self.assertIn("the pod falls asleep", words)
        self.assertIn("the pod wakes", words)

    @slow(6, "it makes two containers, and wakes their pod between")
    async def test_a_container_is_stopped_and_a_pod_removed_while_it_sleeps(self) -> None:
        await self.start()
        _, container = await self.asleep()
        await self.runtime.StopContainer(
            cri.StopContainerRequest(container_id=container, timeout=1), timeout=60.0
        )
        self.assertFalse(await self.sleeps(), "its processes end as they would")
        (sandbox,) = (await self.runtime.ListPodSandbox(cri.ListPodSandboxRequest(), timeout=30.0)).items
        await self.run_container(sandbox.id, self.box("other", script="exec sleep 1000"))
        await self.ctl("sleep", "web")
        await self.stop_pod(sandbox.id)
        await self.remove_pod(sandbox.id)
        self.assertEqual(await self.vms(), [])
        self.assertEqual(list((self.root / "state" / "simulated" / "asleep").iterdir()), [])

    async def test_what_is_damaged_is_a_pod_that_has_ended(self) -> None:
        await self.start()
        sandbox, container = await self.asleep()
        (file,) = (self.root / "state" / "simulated" / "asleep").iterdir()
        file.write_text("{")
        self.assertIn("could not be woken", await self.ctl("wake", "web", code=FAILED))
        with self.assertRaises(GrpcError):
            await self.echo(container)
        request = cri.PodSandboxStatusRequest(pod_sandbox_id=sandbox)
        status = (await self.runtime.PodSandboxStatus(request, timeout=30.0)).status
        self.assertEqual(status.state, cri.SANDBOX_NOTREADY)
        self.assertIn("could not be woken", await self.ctl("describe", "web"))

    @slow(12, "ten seconds have to pass in which nothing happens")
    async def test_an_idle_pod_sleeps_by_itself(self) -> None:
        await self.start()
        sandbox = await self.run_pod("web", annotations={"infranetes.io/sleep-after": "10"})
        container = await self.run_container(sandbox, self.box(script="exec sleep 1000"))
        await self.until_asleep()
        await self.assert_shown_running(sandbox, container)
        self.assertEqual(await self.echo(container), b"on\n")

    async def until_asleep(self) -> None:
        for _ in range(600):
            if await self.sleeps():
                return
            await self.sleep(0.1)
        self.fail("it does not sleep")

    async def test_one_that_is_not_there_or_not_ready_does_not_sleep(self) -> None:
        await self.start()
        self.assertIn("nothing is known of", await self.ctl("sleep", "none", code=FAILED))
        sandbox = await self.run_pod("web")
        await self.create(sandbox, self.box(script="exec sleep 1000"))
        self.assertIn("container main is created", await self.ctl("sleep", "web", code=FAILED))
