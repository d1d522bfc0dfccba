# SPDX-License-Identifier: Apache-2.0
"""Containers in simulated VMs that have namespaces of their own: conmon, crun, and the VM's own files."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from infranetes_common.wire import cri
from tests.harness.durations import slow
from tests.harness.needs import needs_netns
from tests.support.empty_dirs import EmptyDirCase

CGROUP = f"infranetes-tests-daemon-{os.getpid()}"


@slow(5, "machines of their own boot")
@needs_netns
class NamespaceTests(EmptyDirCase):
    """A daemon whose VMs are like a cloud's."""

    timeout = 300
    patience = 3.0

    def setUp(self) -> None:
        super().setUp()
        self.config["providers"]["simulated"] |= {
            "machines": "namespaces",
            "cgroup": CGROUP,
            "pod_cidr": f"198.18.{os.getpid() % 256}.0/24",
        }

    async def said(self, script: str, container: Any = None, **fields: Any) -> list[str]:
        """Run a container of a new pod. Return the lines that it writes."""
        sandbox = await self.run_pod(**fields)
        id = await self.run_container(sandbox, container or self.box(script=script))
        status = await self.in_state(id, cri.CONTAINER_EXITED)
        self.assertEqual(status.exit_code, 0)
        log = Path(status.log_path)
        await self.until(lambda: "the end" in log.read_text(), "the log is whole")
        return [line.split(" ", 3)[3] for line in log.read_text().splitlines()]

    async def test_containers_see_the_vms_names_and_address(self) -> None:
        await self.start()
        said = await self.said("hostname; hostname -i; echo the end", hostname="web-0")
        [vm] = await self.vms()
        self.assertEqual(said, ["web-0", vm["host"], "the end"])

    async def test_a_user_that_is_not_root_may_listen_at_low_ports(self) -> None:
        await self.start()
        context = cri.LinuxContainerSecurityContext(run_as_user=cri.Int64Value(value=1000))
        linux = cri.LinuxContainerConfig(security_context=context)
        box = self.box(script="httpd -p 80 && echo listens; echo the end", linux=linux)
        self.assertEqual(await self.said("", box), ["listens", "the end"])

    async def test_without_a_dns_config_the_resolver_is_the_machines(self) -> None:
        await self.start()
        said = await self.said("cat /etc/resolv.conf; echo the end")
        machines = Path("/etc/resolv.conf").read_text().splitlines()
        self.assertEqual(said, [*machines, "the end"])

    async def test_with_a_dns_config_it_is_the_pods_and_the_machine_keeps_its_own(self) -> None:
        await self.start()
        before = Path("/etc/resolv.conf").read_bytes()
        dns = cri.DNSConfig(servers=["10.96.0.10"], searches=["default.svc.cluster.local"])
        said = await self.said("cat /etc/resolv.conf; echo the end", dns_config=dns)
        self.assertEqual(said, ["nameserver 10.96.0.10", "search default.svc.cluster.local", "the end"])
        self.assertEqual(Path("/etc/resolv.conf").read_bytes(), before)

    async def test_all_mounts_of_an_empty_dir_are_of_one_directory_of_the_vm(self) -> None:
        self.config["volumes"] = {"max_bytes": 1024}  # the limit for volumes that are copied into VMs
        await self.start()
        await self.check_one_directory(2)
        self.assertEqual(os.listdir(self.cache / "a"), [])

    async def missing(self, *names: str) -> list[str]:
        """Run these pods one after the other. Return how many layers were missing in their VMs."""
        await self.start()
        for name in names:
            sandbox = await self.run_pod(name)
            await self.run_container(sandbox, self.box(script="sleep 1000"))
            await self.stop_pod(sandbox)
        return re.findall(r"(\d+) layers were missing", self.log)

    async def test_a_vm_begins_without_layers(self) -> None:
        self.assertEqual(await self.missing("one", "two"), ["1", "1"])

    async def test_a_vm_may_begin_with_the_layers_of_those_before_it(self) -> None:
        self.config["providers"]["simulated"]["keep_layers"] = True
        self.assertEqual(await self.missing("one", "two"), ["1", "0"])
