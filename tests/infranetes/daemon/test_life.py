# SPDX-License-Identifier: Apache-2.0
"""A pod's whole life through the daemon's socket."""

from __future__ import annotations

import json
import os
import stat
import tarfile
from typing import Any

from infranetes_common.wire import cri
from tests.harness.needs import needs_registry
from tests.infranetes.daemon.case import DaemonCase
from txgrpc import Code


@needs_registry
class LifeTests(DaemonCase):
    """From RunPodSandbox to RemovePodSandbox."""

    async def setUp(self) -> None:
        super().setUp()
        await self.start()

    async def test_a_pod_from_its_beginning_to_its_end(self) -> None:
        sandbox = await self.run_pod(labels={"app": "web"}, annotations={"note": "x"})
        request = cri.PodSandboxStatusRequest(pod_sandbox_id=sandbox, verbose=True)
        answer = await self.runtime.PodSandboxStatus(request, timeout=5.0)
        self.assertEqual(answer.status.state, cri.SANDBOX_READY)
        self.assertEqual(dict(answer.status.labels), {"app": "web"})
        self.assertTrue(answer.status.network.ip)
        self.assertEqual(json.loads(answer.info["info"])["agent"]["reach"], "live")

        container = await self.run_container(sandbox, self.box(script="echo hello; exit 3"))
        status = await self.in_state(container, cri.CONTAINER_EXITED)
        self.assertEqual((status.exit_code, status.reason), (3, "Error"))
        self.assertTrue(status.created_at < status.started_at < status.finished_at)
        self.assertEqual(status.image.image, self.image)
        self.assertEqual(status.image_ref, status.image_id)
        self.assertRegex(status.image_id, "^sha256:[0-9a-f]{64}$")

        await self.stop_pod(sandbox)
        self.assertEqual(await self.vms(), [])
        (listed,) = await self.containers()
        self.assertEqual((listed.id, listed.state), (container, cri.CONTAINER_EXITED))
        (shown,) = await self.sandboxes()
        self.assertEqual(shown.state, cri.SANDBOX_NOTREADY)
        await self.stop_pod(sandbox)
        await self.remove_pod(sandbox)
        await self.remove_pod(sandbox)
        self.assertEqual((await self.containers(), await self.sandboxes()), ([], []))

    async def test_commands_limits_and_a_stop(self) -> None:
        sandbox = await self.run_pod()
        container = await self.run_container(sandbox, self.box(script="sleep 1000"))
        request = cri.ExecSyncRequest(
            container_id=container, cmd=["sh", "-c", "echo out; echo err >&2; exit 4"], timeout=10
        )
        result = await self.runtime.ExecSync(request, timeout=20.0)
        self.assertEqual((result.stdout, result.stderr, result.exit_code), (b"out\n", b"err\n", 4))
        much = cri.ExecSyncRequest(
            container_id=container, cmd=["head", "-c", "20000000", "/dev/zero"], timeout=30
        )
        result = await self.runtime.ExecSync(much, timeout=40.0)
        self.assertTrue(8_000_000 < len(result.stdout) < 16 * 1024 * 1024, len(result.stdout))
        self.assertEqual(result.exit_code, 0)
        self.assertIn(f"stdout cut after {len(result.stdout)} bytes", result.stderr.decode())
        just = ["sh", "-c", f"head -c {len(result.stdout)} /dev/zero; head -c 9000000 /dev/zero >&2; exit 3"]
        both = cri.ExecSyncRequest(container_id=container, cmd=just, timeout=30)
        result = await self.runtime.ExecSync(both, timeout=40.0)
        self.assertIn(b"infranetes: stderr cut after", result.stderr[-300:])
        self.assertEqual(result.exit_code, 3)
        slow = cri.ExecSyncRequest(container_id=container, cmd=["sleep", "30"], timeout=1)
        await self.refused(Code.DEADLINE_EXCEEDED, self.runtime.ExecSync(slow, timeout=20.0))
        limits = cri.LinuxContainerResources(memory_limit_in_bytes=64 << 20, cpu_shares=100)
        update = cri.UpdateContainerResourcesRequest(container_id=container, linux=limits)
        await self.runtime.UpdateContainerResources(update, timeout=5.0)
        status = await self.container_status(container)
        self.assertEqual(status.resources.linux.memory_limit_in_bytes, 64 << 20)
        stop = cri.StopContainerRequest(container_id=container, timeout=1)
        await self.runtime.StopContainer(stop, timeout=20.0)
        await self.runtime.StopContainer(stop, timeout=20.0)
        status = await self.container_status(container)
        self.assertEqual(status.state, cri.CONTAINER_EXITED)
        self.assertIn(status.exit_code, (137, 143))
        remove = cri.RemoveContainerRequest(container_id=container)
        await self.runtime.RemoveContainer(remove, timeout=20.0)
        await self.runtime.RemoveContainer(remove, timeout=20.0)
        self.assertEqual(await self.containers(), [])

    async def test_filters_and_short_ids(self) -> None:
        one = await self.run_pod("one", labels={"app": "a", "tier": "x"})
        two = await self.run_pod("two", labels={"app": "b", "tier": "x"})
        first = await self.run_container(one, self.box(labels={"c": "1"}, script="sleep 1000"))
        second = await self.create(two, self.box(labels={"c": "2"}))

        async def sandboxes(**wanted: Any) -> set[str]:
            return {each.id for each in await self.sandboxes(**wanted)}

        async def containers(**wanted: Any) -> set[str]:
            return {each.id for each in await self.containers(**wanted)}

        self.assertEqual(await sandboxes(), {one, two})
        self.assertEqual(await sandboxes(id=one), {one})
        self.assertEqual(await sandboxes(id=one[:10]), {one})
        self.assertEqual(await sandboxes(id="f" * 32), set())
        self.assertEqual(await sandboxes(label_selector={"tier": "x"}), {one, two})
        self.assertEqual(await sandboxes(label_selector={"tier": "x", "app": "b"}), {two})
        not_ready = cri.PodSandboxStateValue(state=cri.SANDBOX_NOTREADY)
        self.assertEqual(await sandboxes(state=not_ready), set())
        await self.stop_pod(two[:12])
        self.assertEqual(await sandboxes(state=not_ready), {two})

        self.assertEqual(await containers(), {first, second})
        self.assertEqual(await containers(id=second[:8]), {second})
        self.assertEqual(await containers(pod_sandbox_id=one[:9]), {first})
        self.assertEqual(await containers(pod_sandbox_id="f" * 32), set())
        self.assertEqual(await containers(label_selector={"c": "2"}), {second})
        running = cri.ContainerStateValue(state=cri.CONTAINER_RUNNING)
        self.assertEqual(await containers(state=running), {first})
        self.assertEqual(await containers(state=running, label_selector={"c": "2"}), set())
        self.assertEqual((await self.container_status(first[:12])).id, first)

    async def test_a_vm_that_ends_by_itself(self) -> None:
        sandbox = await self.run_pod()
        container = await self.run_container(sandbox, self.box(script="sleep 1000"))
        (vm,) = await self.vms()
        await self.farm("behave", id=vm["id"], behaviour="dies-after", after=0)
        status = await self.in_state(container, cri.CONTAINER_EXITED)
        self.assertEqual((status.exit_code, status.reason), (137, "VMEnded"))
        (shown,) = await self.sandboxes()
        self.assertEqual(shown.state, cri.SANDBOX_NOTREADY)
        await self.refused(Code.FAILED_PRECONDITION, self.create(sandbox, self.box("another")))
        await self.stop_pod(sandbox)
        await self.remove_pod(sandbox)
        self.assertEqual(await self.vms(), [])

    async def test_a_vm_that_does_not_come_up_leaves_nothing(self) -> None:
        for behaviour in ("fails", "dies-after"):
            annotations = {
                "simulated.infranetes.io/behaviour": behaviour,
                "simulated.infranetes.io/after": "0",
            }
            await self.refused(
                Code.UNAVAILABLE, self.run_pod(behaviour, self.pod(behaviour, annotations=annotations))
            )
        self.assertEqual(await self.vms(), [])
        self.assertEqual(await self.sandboxes(), [])
        await self.run_pod()

    async def test_the_same_call_twice_at_once_is_one_pod(self) -> None:
        config = self.pod("twin")
        first = self.runtime.RunPodSandbox(cri.RunPodSandboxRequest(config=config), timeout=30.0)
        second = self.runtime.RunPodSandbox(cri.RunPodSandboxRequest(config=config), timeout=30.0)
        self.assertEqual((await first).pod_sandbox_id, (await second).pod_sandbox_id)
        self.assertEqual(len(await self.vms()), 1)
        await self.refused(Code.ALREADY_EXISTS, self.run_pod("twin", config))

    async def test_kubelet_gives_up_and_asks_again(self) -> None:
        """The call ends at its deadline; the launch goes on."""
        request = cri.RunPodSandboxRequest(config=self.pod("slow"))
        call = self.runtime.RunPodSandbox(request, timeout=0.03)
        await self.refused(Code.DEADLINE_EXCEEDED, call)
        again = await self.runtime.RunPodSandbox(request, timeout=30.0)
        (vm,) = await self.vms()
        self.assertEqual(vm["sandbox_id"], again.pod_sandbox_id)

    async def test_who_may_connect(self) -> None:
        mode = stat.S_IMODE(os.stat(self.socket).st_mode)
        self.assertEqual(mode, 0o660)
        for kept in ("store", "ca", "images"):
            mode = stat.S_IMODE(os.stat(self.root / "state" / kept).st_mode)
            self.assertEqual(mode & 0o077, 0, kept)

    async def test_a_container_is_checkpointed_where_the_call_says(self) -> None:
        container = await self.run_container(await self.run_pod(), self.box(script="sleep 1000"))
        request = cri.CheckpointContainerRequest(container_id=container, location=str(self.root / "made"))
        await self.runtime.CheckpointContainer(request, timeout=5.0)
        with tarfile.open(self.root / "made") as archive:
            self.assertIn("checkpoint/vm.json", archive.getnames())
        await self.refused(Code.ALREADY_EXISTS, self.runtime.CheckpointContainer(request, timeout=5.0))

    async def test_who_it_is(self) -> None:
        version = await self.runtime.Version(cri.VersionRequest(), timeout=5.0)
        self.assertEqual((version.runtime_name, version.runtime_api_version), ("infranetes", "v1"))
        self.assertRegex(version.runtime_version, r"^\d+\.\d+\.\d+")
        status = await self.runtime.Status(cri.StatusRequest(verbose=True), timeout=5.0)
        self.assertEqual({each.type: each.status for each in status.status.conditions},
                         {"RuntimeReady": True, "NetworkReady": True})  # fmt: skip
        self.assertEqual(json.loads(status.info["provider"])["name"], "simulated")
        config = await self.runtime.RuntimeConfig(cri.RuntimeConfigRequest(), timeout=5.0)
        self.assertEqual(config.linux.cgroup_driver, cri.SYSTEMD)

    async def test_the_pod_cidr_is_taken_and_kept(self) -> None:
        await self.configure("10.99.0.0/24,fd00::/64")
        await self.restart()
        sandbox = await self.run_pod()
        request = cri.PodSandboxStatusRequest(pod_sandbox_id=sandbox)
        status = (await self.runtime.PodSandboxStatus(request, timeout=5.0)).status
        self.assertTrue(status.network.ip.startswith("10.99.0."), status.network.ip)
        await self.configure("10.99.0.0/24")
        await self.configure("")
        await self.refused(Code.INVALID_ARGUMENT, self.configure("not a subnet"))
        await self.refused(Code.INVALID_ARGUMENT, self.configure("fd00::/64"))

    async def configure(self, pod_cidr: str) -> None:
        network = cri.NetworkConfig(pod_cidr=pod_cidr)
        request = cri.UpdateRuntimeConfigRequest(runtime_config=cri.RuntimeConfig(network_config=network))
        await self.runtime.UpdateRuntimeConfig(request, timeout=5.0)
