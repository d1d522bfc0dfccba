# SPDX-License-Identifier: Apache-2.0
"""The parts of a pod's configuration that the node implements: host ports, profiles, images as volumes."""

from __future__ import annotations

import json
import socket
from typing import Any

from infranetes_common.wire import cri
from tests.harness.needs import needs_netns, needs_registry
from tests.infranetes.daemon.case import DaemonCase
from tests.infranetes.daemon.hostports import drop_table, free_port, host_port, in_kernel, route_to_pods
from txgrpc import Code


@needs_registry
@needs_netns
class HostPortTests(DaemonCase):
    """Host ports come and go with their sandbox, whatever happens to the daemon."""

    def setUp(self) -> None:
        super().setUp()
        self.port = free_port()
        self.config["times"] = {"sweep": 0.3}
        self.addCleanup(drop_table, self.root)
        route_to_pods(self)

    async def element(self, sandbox: str, port: int) -> str:
        request = cri.PodSandboxStatusRequest(pod_sandbox_id=sandbox)
        status = (await self.runtime.PodSandboxStatus(request, timeout=10.0)).status
        return f"tcp . {port} : {status.network.ip} . 80"

    async def test_their_life(self) -> None:
        await self.start()
        one = await self.run_pod("one", port_mappings=[host_port(self.port)])
        element = await self.element(one, self.port)
        self.assertIn(element, in_kernel(self.root))

        config = self.pod("two", port_mappings=[host_port(self.port, host_ip="127.0.0.1")])
        request = cri.RunPodSandboxRequest(config=config)
        call = self.runtime.RunPodSandbox(request, timeout=30.0)
        message = await self.refused(Code.FAILED_PRECONDITION, call)
        self.assertIn(f"taken by sandbox {one} (pod default/one)", message)
        with socket.create_server(("127.0.0.1", 0)) as used:
            config.port_mappings[0].host_port = used.getsockname()[1]
            request = cri.RunPodSandboxRequest(config=config)
            call = self.runtime.RunPodSandbox(request, timeout=30.0)
            self.assertIn("used by a process", await self.refused(Code.FAILED_PRECONDITION, call))
        self.assertEqual(len(await self.sandboxes()), 1)

        await self.kill()
        self.assertIn(element, in_kernel(self.root))
        drop_table(self.root)
        await self.start()
        self.assertIn(element, in_kernel(self.root))
        drop_table(self.root)
        await self.until(lambda: element in in_kernel(self.root), "the sweep puts it right")

        other = free_port()
        two = await self.run_pod("two", port_mappings=[host_port(other)])
        await self.stop_pod(one)
        self.assertNotIn(element, in_kernel(self.root))
        self.assertIn(await self.element(two, other), in_kernel(self.root))
        three = await self.run_pod("three", port_mappings=[host_port(self.port)])
        for sandbox in (one, two, three):
            await self.remove_pod(sandbox)
        self.assertEqual(in_kernel(self.root), "")

    async def test_those_of_a_vm_that_ended_by_itself_go_with_its_sandbox(self) -> None:
        await self.start()
        vm = await self.run_pod("one", port_mappings=[host_port(self.port)])
        vms = {each["sandbox_id"]: each["id"] for each in await self.vms()}
        await self.farm("behave", id=vms[vm], behaviour="dies-after", after=0)

        async def lost() -> bool:
            return [each.state for each in await self.sandboxes()] == [cri.SANDBOX_NOTREADY]

        for _ in range(100):
            if await lost():
                break
            await self.sleep(0.1)
        self.assertTrue(await lost())
        await self.remove_pod(vm)
        self.assertEqual(in_kernel(self.root), "")


@needs_registry
class ConfigTests(DaemonCase):
    """The error names what is not supported, and nothing of the container is left."""

    def secured(self, **fields: Any) -> Any:
        return cri.LinuxContainerConfig(security_context=cri.LinuxContainerSecurityContext(**fields))

    async def test_profiles_and_images_of_the_node(self) -> None:
        await self.start()
        sandbox = await self.run_pod()
        profile = self.root / "profile.json"
        kind = cri.SecurityProfile
        local = self.secured(seccomp=kind(profile_type=kind.Localhost, localhost_ref=str(profile)))
        image = cri.Mount(container_path="/image", image=cri.ImageSpec(image="nowhere/missing:1"))
        for config, code, words in (
            (self.box(linux=local), Code.FAILED_PRECONDITION, f"{profile} is not on this node"),
            (self.box(mounts=[image]), Code.NOT_FOUND, "config.mounts[0] at /image"),
        ):
            request = cri.CreateContainerRequest(pod_sandbox_id=sandbox, config=config)
            call = self.runtime.CreateContainer(request, timeout=30.0)
            self.assertIn(words, await self.refused(code, call))
        self.assertEqual(await self.containers(), [])
        profile.write_text(json.dumps({"defaultAction": "SCMP_ACT_ALLOW"}))
        await self.create(sandbox, self.box(linux=local))

    async def test_what_is_offered_is_said(self) -> None:
        await self.start()
        status = await self.runtime.Status(cri.StatusRequest(), timeout=10.0)
        self.assertTrue(status.features.supplemental_groups_policy)
        for handler in status.runtime_handlers:
            self.assertTrue(handler.features.user_namespaces)
            self.assertTrue(handler.features.recursive_read_only_mounts)
