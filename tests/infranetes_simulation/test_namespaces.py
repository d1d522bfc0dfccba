# SPDX-License-Identifier: Apache-2.0
"""Simulated VMs in namespaces of their own: the contract of providers, and what such a VM is and leaves."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
from pathlib import Path
from typing import Any

from twisted.trial.unittest import TestCase

from infranetes.providers.interface import Instance, InstanceState
from infranetes_common.wire import vmserver
from infranetes_simulation.machine import AGENT_PORT, cgroups, network
from infranetes_simulation.protocol import DIES_AFTER, ENDED, NO_AGENT, NORMAL, UNREACHABLE
from infranetes_simulation.provider.settings import AFTER_ANNOTATION, BEHAVIOUR_ANNOTATION
from tests.contract.leased_addresses import LeasedAddressContract
from tests.contract.pod_provider import PodProviderContract
from tests.contract.pod_provider_case import reactor
from tests.harness.durations import slow
from tests.harness.needs import needs_netns, needs_root, repetitions
from tests.infranetes_simulation.test_provider import SimulatedCase
from tests.txgrpc.support import status_of
from txgrpc import Code

CGROUP = f"infranetes-tests-simulated-{secrets.token_hex(4)}"  # process ids are not unique among workers


@needs_root
class NamespaceCase(SimulatedCase):
    """Leaves no process, mount, link or cgroup."""

    # For measurements of networks (RFC 2544): no machine has addresses of it.
    pod_cidr = f"198.18.{os.getpid() % 256}.0/24"
    other_cidr = f"198.19.{os.getpid() % 256}.0/24"
    # The others are those of VMs in the farm's process, whose launches are the same code.
    interrupt_after = repetitions((0.05,), nightly=SimulatedCase.interrupt_after)
    agent_timeout = 60.0
    start_timeout = boot_timeout = call_timeout = notice_timeout = 60.0

    def setUp(self) -> Any:
        super().setUp()
        self.settings |= {"machines": "namespaces", "cgroup": CGROUP}
        self.machine_id = Path("/etc/machine-id").read_bytes()

    @property
    def farm_directory(self) -> Path:
        return self.state_dir / "simulated"

    async def leftovers(self) -> list[str]:
        await super().leftovers()
        await self.until(lambda: not self.remains(), "nothing is left of VMs")
        return self.remains()

    def remains(self) -> list[str]:
        """Describe what VMs hold on this machine."""
        found = [str(top / CGROUP) for top in cgroups.hierarchies() if (top / CGROUP).exists()]
        bridge = network.bridge_of(self.farm_directory)
        found += [link for link in os.listdir("/sys/class/net") if link == bridge]
        directory = str(self.farm_directory)
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (process / "cmdline").read_text(errors="replace")
                if directory in words and "infranetes_simulation.farm" not in words:
                    found.append(f"process {process.name}")
        for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
            with contextlib.suppress(OSError):
                if directory in backing.read_text():
                    found.append(str(backing))
        return found

    def processes(self, instance: Instance, module: str) -> list[int]:
        """Return the processes of a VM that run a module of `infranetes_simulation.machine`."""
        directory = str(self.farm_directory / instance.id)
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (process / "cmdline").read_text(errors="replace").split("\0")
                if words[1:3] == ["-m", f"infranetes_simulation.machine.{module}"] and directory in words[3]:
                    found.append(int(process.name))
        return found

    def kill(self, instance: Instance, module: str) -> None:
        [pid] = self.processes(instance, module)
        os.kill(pid, signal.SIGKILL)

    async def state(self, instance: Instance) -> object:
        """Return what its farm says."""
        return (await self.farm("get", id=instance.id))["vm"]["state"]

    async def end_from_outside(self, instance: Instance) -> None:
        self.kill(instance, "guest")
        while await self.state(instance) != ENDED:
            await self.sleep(0.05)


@slow(8, "each of its VMs is namespaces, and a Python that imports the agent")
@needs_netns
class NamespaceContractTests(NamespaceCase, PodProviderContract, LeasedAddressContract, TestCase):
    """What every provider does."""


@slow(5, "each of its VMs is namespaces, and a Python that imports the agent")
@needs_netns
class NamespaceTests(NamespaceCase, TestCase):
    """What only such VMs do."""

    async def test_each_has_its_own_address_network_and_processes(self) -> None:
        provider = await self.started()
        instances = [await self.running(provider, self.spec()) for _ in range(2)]
        networks = {os.stat("/proc/self/ns/net").st_ino}
        for instance in instances:
            info = await self.agent_info(instance)
            self.assertEqual((instance.agent_host, instance.agent_port), (instance.address, AGENT_PORT))
            self.assertEqual((info.container_provider, info.takes_layers), ("oci", True))
            [first] = self.processes(instance, "guest")
            networks.add(os.stat(f"/proc/{first}/ns/net").st_ino)
            status = Path(f"/proc/{first}/status").read_text()
            self.assertEqual(re.findall(r"^NSpid:.*\t(\d+)$", status, re.M), ["1"])
        self.assertEqual(len(networks), 3)

    async def test_it_can_not_change_the_machines_files_clock_or_modules(self) -> None:
        provider = await self.started()
        instance = await self.running(provider, self.spec())
        await self.agent_info(instance)
        [first] = self.processes(instance, "guest")
        mounts = Path(f"/proc/{first}/mountinfo").read_text().splitlines()
        options = {line.split()[4]: line.split()[5].split(",") for line in mounts}
        self.assertIn("ro", options["/"])
        self.assertIn("rw", options["/etc"])
        self.assertEqual(Path("/etc/machine-id").read_bytes(), self.machine_id)
        [bounding] = re.findall(r"^CapBnd:\t(\w+)$", Path(f"/proc/{first}/status").read_text(), re.M)
        for capability in (16, 22, 25):  # modules, power, clock: linux/capability.h
            self.assertFalse(int(bounding, 16) >> capability & 1, capability)

    async def test_one_without_agent_refuses_and_a_silent_one_says_nothing(self) -> None:
        provider = await self.started()
        instance = await self.running(provider, self.spec(annotations={BEHAVIOUR_ANNOTATION: NO_AGENT}))
        for behaviour, code in (
            (UNREACHABLE, Code.DEADLINE_EXCEEDED),
            (NO_AGENT, Code.UNAVAILABLE),
        ):
            await self.farm("behave", id=instance.id, behaviour=behaviour, after=0)
            await self.answered(instance, code)
        await self.farm("behave", id=instance.id, behaviour=NORMAL, after=0)
        await self.agent_info(instance)

    async def answered(self, instance: Instance, code: Code) -> None:
        """Wait until a call of the agent fails like that."""
        deadline = reactor.seconds() + self.agent_timeout
        while True:
            failed = await status_of(self.agent(instance).Info(vmserver.InfoRequest(), timeout=1.0))
            if failed.code is code:
                return
            self.assertLess(reactor.seconds(), deadline, failed)

    async def test_an_agent_that_is_killed_is_started_again(self) -> None:
        provider = await self.started()
        instance = await self.running(provider, self.spec())
        before = await self.agent_info(instance)
        [first] = self.processes(instance, "guest")
        [agent] = map(int, Path(f"/proc/{first}/task/{first}/children").read_text().split())
        os.kill(agent, signal.SIGKILL)
        await self.until(lambda: not Path(f"/proc/{agent}").exists(), "the agent is gone")
        after = await self.agent_info(instance)
        self.assertEqual(after.boot_id, before.boot_id)
        self.assertNotEqual(after.agent_id, before.agent_id)

    async def test_when_its_hypervisor_is_killed_it_has_ended_and_nothing_is_left(self) -> None:
        provider = await self.started()
        ended: list[Instance] = []
        provider.watch(ended.append)
        instance = await self.running(provider, self.spec())
        self.kill(instance, "hypervisor")
        await self.until(lambda: ended, "the VM's end is told")
        self.assertEqual(ended[0].id, instance.id)
        await self.until(lambda: not self.remains(), "nothing of it is left")

    async def test_when_the_farm_is_killed_nothing_of_its_vms_is_left(self) -> None:
        provider = await self.started()
        ended: list[Instance] = []
        provider.watch(ended.append)
        for _ in range(2):
            await self.agent_info(await self.running(provider, self.spec()))
        for pid in self.farm_pids():
            os.kill(pid, signal.SIGKILL)
        await self.until(lambda: len(ended) == 2, "the end of each VM is told")
        self.assertEqual({one.state for one in await provider.list()}, {InstanceState.ENDED})
        await self.until(lambda: not self.remains(), "nothing of them is left")

    async def test_it_ends_after_a_while(self) -> None:
        provider = await self.started()
        ended: list[Instance] = []
        provider.watch(ended.append)
        asked = {BEHAVIOUR_ANNOTATION: DIES_AFTER, AFTER_ANNOTATION: "0.3"}
        instance = await self.running(provider, self.spec(annotations=asked))
        await self.until(lambda: ended, "the VM's end is told")
        self.assertEqual(ended[0].id, instance.id)
