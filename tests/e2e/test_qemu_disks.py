# SPDX-License-Identifier: Apache-2.0
"""Files of the node as disks of real QEMU VMs, whose guests find them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
from twisted.trial.unittest import TestCase

from infranetes.providers.interface import (
    InstanceState,
    IShowsDisks,
    Progress,
    ProviderContext,
    ReadOnlyDisk,
    ShownDisk,
)
from infranetes.providers.qemu import QemuProvider, disks
from infranetes_common.wire import vmserver
from tests.contract.pod_provider_case import reactor
from tests.contract.shown_disks import ShownDisksContract
from tests.e2e.qemu_case import QemuCase
from txgrpc import Code, GrpcError


class QemuDisksTests(QemuCase, ShownDisksContract, TestCase):
    """The contract, in VMs that are clones."""

    most = disks.MOST
    preloaded: Sequence[ReadOnlyDisk] = ()

    async def shower(self) -> QemuProvider:
        provider = await self.started()
        assert isinstance(provider, QemuProvider)
        return provider

    async def machine(self, shower: IShowsDisks) -> str:
        assert isinstance(shower, QemuProvider)
        return (await self.running(shower, self.spec())).id

    async def next_daemon(self, shower: IShowsDisks) -> QemuProvider:
        assert isinstance(shower, QemuProvider)
        provider = await self.restarted(shower)
        assert isinstance(provider, QemuProvider)
        return provider

    async def end(self, shower: IShowsDisks, machine: str) -> None:
        assert isinstance(shower, QemuProvider)
        ended: list[object] = []
        shower.watch(ended.append)
        await self.end_from_outside(await shower.get(machine))
        await self.until(lambda: ended, "the end is told")
        self.assertIs((await shower.get(machine)).state, InstanceState.ENDED)

    def is_open(self, path: Path) -> bool:
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if process.name != str(os.getpid()) and any(
                    os.readlink(each) == str(path) for each in (process / "fd").iterdir()
                ):
                    return True
            except OSError:
                continue
        return False

    async def assert_seen(self, shower: IShowsDisks, machine: str, shown: Sequence[ShownDisk]) -> None:
        """Assert that the agent finds them, and that the guest reads each, in search of partitions."""
        assert isinstance(shower, QemuProvider)
        instance = await shower.get(machine)
        await self.agent_info(instance)
        deadline = reactor.seconds() + self.notice_timeout
        disks = [
            vmserver.LayerDisk(diff_id=f"sha256:{each.name}", target=each.target, lun=each.lun)
            for each in shown
        ]
        mounting = self.agent(instance).MountLayers(vmserver.MountLayersRequest(disks=disks), timeout=60.0)
        error = await self.assertFailure(mounting, GrpcError)
        self.assertIs(error.code, Code.FAILED_PRECONDITION, error)  # they hold no layers
        wanted = {f"shown-{each.target}-{each.lun}-{each.name}" for each in shown}
        while not wanted <= await self.read(shower, machine):
            self.assertLess(reactor.seconds(), deadline, "the guest finds its disks")
            await self.sleep(0.02)

    async def read(self, shower: Any, machine: str) -> set[str]:  # Any: has the daemon's own connection
        """Return the devices that the guest has read from."""
        [vm] = (vm for vm in shower._vms.values() if vm.record.id == machine)
        answer = await vm.connections.qmp.execute("query-blockstats")
        return {each["qdev"] for each in answer if each["stats"]["rd_operations"]}

    async def test_a_clone_finds_forty_disks_at_once(self) -> None:
        shower = await self.shower()
        machine = await self.machine(shower)
        for layers in (self.disks(1, "one"), self.disks(10, "ten"), self.disks(40, "forty")):
            shown = await shower.show_disks(machine, layers)
            await self.assert_seen(shower, machine, shown)
            await shower.hide_disks(machine, [each.name for each in shown])
        await self.agent_info(await shower.get(machine))

    def context(self, cluster: str | None = None, node: str | None = None) -> ProviderContext:
        return attrs.evolve(super().context(cluster, node), preload_disks=self.preload_disks)

    async def preload_disks(self, progress: Progress) -> Sequence[ReadOnlyDisk]:
        return self.preloaded

    async def test_those_of_preloaded_images_are_there_before_a_clone_executes(self) -> None:
        self.preloaded = self.disks(3, "first")
        shower = await self.shower()
        machine = await self.machine(shower)
        shown = await shower.shown_disks(machine)
        self.assertEqual({each.name for each in shown}, {each.name for each in self.preloaded})
        self.assertEqual(set(await shower.show_disks(machine, self.preloaded)), set(shown))
        await self.assert_seen(shower, machine, shown)
        await shower.hide_disks(machine, [each.name for each in shown])
        self.preloaded[0].path.unlink()
        self.assertEqual(list(await shower.shown_disks(await self.machine(shower))), [])
