# SPDX-License-Identifier: Apache-2.0
"""A guest whose services sleep has what udevd and systemd would have done, whatever becomes of its agent."""

from __future__ import annotations

import contextlib
from typing import Any

from infranetes_common.wire import cri
from tests.e2e.volume_case import VolumeTroubleCase
from tests.harness.durations import slow
from txgrpc import GrpcError

_GIB_OF_KIB = 1 << 20
_UNTIL = "for i in $(seq 600); do {} && exit 0; sleep 0.1; done; exit 1"


@slow(20, "two emulated VMs, and an agent that starts again in one of them")
class QuietGuestTests(VolumeTroubleCase):
    def seeing(self, name: str) -> Any:
        """Return a container that mounts the volume and sees all processes of the VM."""
        namespaces = cri.NamespaceOption(pid=cri.NODE)
        linux = cri.LinuxContainerConfig(
            security_context=cri.LinuxContainerSecurityContext(privileged=True, namespace_options=namespaces)
        )
        return self.mounting(self.published, name, self.keep, linux=linux)

    async def said(self, container: str, script: str) -> str:
        done = await self.execute(container, "sh", "-c", script)
        self.assertEqual(done.exit_code, 0, done)
        return str(done.stdout.decode())

    async def test_the_next_agent_has_the_mounts_of_the_one_before_and_the_vm_its_size(self) -> None:
        self.config["providers"]["qemu"]["max_cpus"] = 2
        await self.start()
        self.publish("first")
        linux = cri.LinuxPodSandboxConfig(
            resources=cri.LinuxContainerResources(cpu_period=100_000, cpu_quota=200_000)
        )
        sandbox = await self.run_pod("web", annotations={"infranetes.io/disk": "24Gi"}, linux=linux)
        self.pods += 1
        first = await self.run_container(sandbox, self.seeing("first"))
        await self.has_written(first)
        await self.said(first, _UNTIL.format("[ $(grep -c ^processor /proc/cpuinfo) = 2 ]"))
        await self.said(
            first, _UNTIL.format(f"[ $(df -k / | awk 'END{{print $2}}') -gt {22 * _GIB_OF_KIB} ]")
        )
        programs = (await self.said(first, "cat /proc/[0-9]*/comm")).split()
        self.assertIn("conmon", programs)
        self.assertNotIn("systemd-udevd", programs)
        self.assertNotIn("/vmserver/", await self.said(first, "cat /proc/1/mountinfo"))
        with contextlib.suppress(GrpcError):  # the answer is lost with the agent
            await self.execute(first, "sh", "-c", "kill -KILL $(pgrep -f vmserver.toml)")
        second = await self.run_container(sandbox, self.seeing("second"))
        self.assertEqual(await self.said(second, "cat /data/file"), "kept\n")
        self.assertNotIn("/vmserver/", await self.said(second, "cat /proc/1/mountinfo"))
        await self.end(sandbox)
        self.assertTrue(self.is_free())
        await self.assert_kept()
