# SPDX-License-Identifier: Apache-2.0
"""The QEMU provider's launches from the state of a kept VM, with a program in QEMU's place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
from twisted.internet.defer import gatherResults
from twisted.trial.unittest import TestCase

from infranetes.providers.interface import InstanceSpec, InstanceState, Size
from infranetes.providers.keeping import IStartsKeptVms
from infranetes.providers.qemu.keep.hardware import Disk, Hardware, Piece
from infranetes.providers.qemu.keep.state import HARDWARE, layer_file, thd_kept, thd_seal
from infranetes.providers.qemu.template.template import DISK, OVERLAY, RAM, STATE, Template
from infranetes.providers.qemu.vm import record
from infranetes_common.errors import FailedPrecondition, Unavailable
from tests.contract.interrupted_launches import InterruptedLaunchContract
from tests.harness.durations import slow
from tests.harness.needs import needs_netns, needs_programs
from tests.infranetes.providers.qemu.stand_in_case import StandInCase

_LAYER = Disk("ab" * 32, 0, 7, 4096)


class KeptLaunchCase(StandInCase):
    """A kept VM that others start from."""

    async def begun(self, **more: Any) -> tuple[Any, Path]:
        """Return a provider that has started, and the state of a VM of its template.

        :param more: fields of what the VM had."""
        provider: Any = await self.started()
        self.assertTrue(IStartsKeptVms.providedBy(provider))
        template: Template = provider._current.template
        hardware = Hardware(
            "7.2.0",
            "tcg",
            template.image.key,
            template.directory.name,
            256,
            template.disk,
            template.made_at(),
        )
        return provider, self.state(attrs.evolve(hardware, **more))

    def state(self, hardware: Hardware) -> Path:
        """Make the files of a kept VM that is prepared."""
        directory = self.state_dir / "kept"
        directory.mkdir(0o700)
        (directory / HARDWARE).write_bytes(hardware.encode())
        for name in (DISK, OVERLAY, STATE):
            (directory / name).write_bytes(b"of a kept VM")
        (directory / RAM).write_bytes(bytes(1 << 20))
        for disk in hardware.disks:
            layer_file(directory, disk).write_bytes(bytes(disk.size))
        thd_seal(directory, hardware)
        return directory

    def spec_from(self, directory: Path, **asked: Any) -> InstanceSpec:
        """Return the specification of a VM that starts from it."""
        return attrs.evolve(self.spec(**asked), kept=directory)


@needs_netns
@needs_programs("qemu-img")
class InterruptedLaunchTests(KeptLaunchCase, InterruptedLaunchContract, TestCase):
    """The contract of launches that are interrupted, for VMs that start from a kept one."""

    directory: Path

    def spec(self, **asked: Any) -> InstanceSpec:
        return attrs.evolve(super().spec(**asked), kept=self.directory)

    async def test_a_launch_that_is_cancelled_can_be_made_again_or_destroyed(self) -> None:
        provider, self.directory = await self.begun()
        await self.within(provider.stop())
        await super().test_a_launch_that_is_cancelled_can_be_made_again_or_destroyed()

    @slow(10, "it starts and kills daemons")
    async def test_a_daemon_killed_in_a_launch_leaves_what_the_next_one_adopts_or_ends(self) -> None:
        provider, self.directory = await self.begun()
        await self.within(provider.stop())
        await super().test_a_daemon_killed_in_a_launch_leaves_what_the_next_one_adopts_or_ends()


@needs_netns
@needs_programs("qemu-img")
class KeptLaunchTests(KeptLaunchCase, TestCase):
    """VMs that start from a kept one."""

    def arguments(self, pid: int) -> str:
        """Return the arguments of a VM's QEMU."""
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()

    async def test_its_disk_is_a_layer_over_the_kept_one_and_both_are_known_later(self) -> None:
        provider, directory = await self.begun()
        kept, usual = [
            await self.running(provider, spec) for spec in (self.spec_from(directory), self.spec())
        ]
        [pid], [other] = self.pids(kept), self.pids(usual)
        self.assertIn("-add-fd fd=16,set=16", self.arguments(pid))
        self.assertIn("backing.file.filename=/dev/fdset/16,backing.backing.driver=qcow2", self.arguments(pid))
        self.assertNotIn("fdset", self.arguments(other))
        self.assertEqual(Path(f"/proc/{pid}/fd/16").readlink(), directory / DISK)
        self.assertEqual(Path(f"/proc/{pid}/fd/4").readlink(), directory / STATE)
        self.assertEqual((self.vms() / kept.token / record.DISK).read_bytes(), b"of a kept VM")
        self.assertEqual((await self.agent_info(kept)).sandbox_id, kept.sandbox_id)
        following: Any = await self.restarted(provider)
        self.assertEqual({each.id for each in await following.list()}, {kept.id, usual.id})
        empty = self.state_dir / "empty"
        empty.mkdir()
        words = str(await self.refused(FailedPrecondition, following.keep(kept.id, empty, 5.0)))
        self.assertIn(str(directory), words)

    async def test_its_disks_and_hardware_are_there_before_its_state(self) -> None:
        piece = Piece("dimm0", "more", 1 << 32, 0, 1024)
        provider, directory = await self.begun(disks=(_LAYER,), cores=(1,), pieces=(piece,))
        size = Size(cpu_millis=2000, memory_bytes=1 << 30)
        instance = await self.running(provider, self.spec_from(directory, size=size))
        console = (self.vms() / instance.token / record.CONSOLE).read_text().splitlines()
        plugged = [json.loads(line)["device_add"] for line in console if "device_add" in line]
        self.assertEqual(plugged, ["cpu1", "dimm0", f"shown-0-7-{_LAYER.name}"])
        more = self.spec_from(directory, size=Size(cpu_millis=2000, memory_bytes=2 << 30))
        words = await self.refused(FailedPrecondition, provider.launch(more))
        self.assertIn("the kept one has 1024 MiB and 1 processors more", str(words))

    async def test_a_larger_pod_gets_what_a_vm_without_more_lacks(self) -> None:
        provider, directory = await self.begun()
        size = Size(cpu_millis=2000)
        asked = {"infranetes.io/disk": "30Gi"}
        spec = self.spec_from(directory, size=size, annotations=asked)
        instance = await self.running(provider, spec)
        console = (self.vms() / instance.token / record.CONSOLE).read_text()
        self.assertIn("cpu1", console)
        self.assertIn(str(30 << 30), console)

    async def test_several_at_once_share_the_memory_and_the_last_one_lets_it_go(self) -> None:
        provider, directory = await self.begun()
        instances = await gatherResults(
            [self.within(provider.launch(self.spec_from(directory))) for _ in range(3)], consumeErrors=True
        )
        for each in instances:
            await self.within(provider.wait_running(each.id, self.boot_timeout))
        self.assertEqual(len({id(vm.ram) for vm in provider._vms.values()}), 1)
        memories = provider._launcher._ram._memories
        self.assertEqual(len(memories), 2, "the template's and its own")
        for each in instances:
            await self.within(provider.destroy(each.id))
        self.assertEqual(len(memories), 1)

    async def test_one_that_can_not_be_loaded_leaves_nothing(self) -> None:
        provider, directory = await self.begun()
        (directory / STATE).write_bytes(b"")
        thd_seal(directory, thd_kept(directory))
        spec = self.spec_from(directory)
        for _ in range(2):
            words = await self.refused(Unavailable, provider.launch(spec))
            self.assertIn("could not load the VM's state", str(words))
            self.assertEqual((await provider.list(), list(self.vms().iterdir())), ([], []))
        self.assertEqual(len(provider._launcher._ram._memories), 1)
        await self.running(provider, self.spec())

    async def test_it_is_destroyed_while_it_starts(self) -> None:
        self.silence_agents()
        provider, directory = await self.begun()
        launched = await self.within(provider.launch(self.spec_from(directory)))
        self.assertIs(launched.state, InstanceState.PENDING)
        for _ in range(2):
            await self.within(provider.destroy(launched.id))
        self.assertEqual(await provider.list(), [])
        self.assertEqual(self.pids(launched), [])

    async def test_another_template_is_refused_before_anything_is_made(self) -> None:
        provider, directory = await self.begun()
        template: Template = provider._current.template
        spec = self.spec_from(directory)
        first = await self.within(provider.launch(spec))
        template.seal(template.directory)
        for _ in range(2):
            words = str(await self.refused(FailedPrecondition, provider.launch(self.spec_from(directory))))
            self.assertIn("another template", words)
            await self.refused(FailedPrecondition, provider.check(directory))
        self.assertEqual((await self.within(provider.launch(spec))).id, first.id, "it was launched before")
        self.assertEqual([each.id for each in await provider.list()], [first.id])
