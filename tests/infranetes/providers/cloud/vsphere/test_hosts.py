# SPDX-License-Identifier: Apache-2.0
"""On which of a cluster's hosts a VM is created."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyVmomi import vim
from twisted.internet.defer import gatherResults
from twisted.internet.task import deferLater
from twisted.trial.unittest import TestCase

from infranetes_common.errors import ResourceExhausted
from tests.contract.pod_provider_case import reactor
from tests.infranetes.providers.cloud.vsphere.case import VsphereCase
from tests.infranetes.providers.cloud.vsphere.test_library import LibraryCase
from tests.support.clouds import vcsim
from tests.support.clouds.faults import NEVER
from tests.support.clouds.library import DEPLOY

_HOST = re.compile(r"<host(?: [^>]*)?>([^<]+)</host>")


class HostsCase(VsphereCase):
    """Base class: the cluster of three hosts has DRS switched off."""

    def setUp(self) -> Any:
        result = super().setUp()
        self.world.behaviour = NEVER
        self.cluster_of_hosts = self.world.vcsim.find("host/DC0_C0")
        self.hosts = sorted(self.cluster_of_hosts.host, key=lambda host: host.name)
        self.switch_drs(False)
        self.addCleanup(self.switch_drs, True)
        return result

    def switch_drs(self, on: bool) -> None:
        spec = vim.cluster.ConfigSpecEx(drsConfig=vim.cluster.DrsConfigInfo(enabled=on))
        vcsim.done(self.cluster_of_hosts.ReconfigureComputeResource_Task(spec, True))

    def undone(self, do: Callable[[], Any], undo: Callable[[], Any]) -> None:
        """Change something in the vCenter until the end of the test."""
        vcsim.done(do())
        self.addCleanup(lambda: vcsim.done(undo()))

    def chosen(self) -> list[str]:
        """Return the names of the hosts that clones requested, in order."""
        names = {host._moId: host.name for host in self.hosts}
        return [
            names[each] for clone in self.world.asked("CloneVM_Task") for each in _HOST.findall(clone["body"])
        ]

    async def launched(self, provider: Any, count: int = 1) -> None:
        await self.within(gatherResults([provider.launch(self.spec()) for _ in range(count)]))


class HostTests(HostsCase, TestCase):
    """Pods' VMs."""

    async def test_without_drs_vms_are_spread_over_the_clusters_hosts(self) -> None:
        provider = await self.started()
        await self.launched(provider, 6)
        self.assertEqual(Counter(self.chosen()), {host.name: 2 for host in self.hosts})
        self.assertEqual(Counter(vm.runtime.host.name for vm in self.world.vms()), Counter(self.chosen()))

    async def test_with_drs_vcenter_chooses(self) -> None:
        self.switch_drs(True)
        await self.launched(await self.started())
        self.assertEqual((len(self.world.vms()), self.chosen()), (1, []))

    async def test_hosts_in_maintenance_or_not_connected_get_none(self) -> None:
        first, second, third = self.hosts
        self.undone(
            lambda: first.EnterMaintenanceMode_Task(0, False), lambda: first.ExitMaintenanceMode_Task(0)
        )
        self.undone(second.DisconnectHost_Task, second.ReconnectHost_Task)
        await self.launched(await self.started(), 2)
        self.assertEqual(self.chosen(), [third.name, third.name])

    async def test_a_host_without_the_datastore_gets_none(self) -> None:
        directory = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, directory)
        system = self.hosts[1].configManager.datastoreSystem
        datastore = system.CreateLocalDatastore(name=directory.name, path=str(directory))
        self.addCleanup(lambda: vcsim.done(datastore.Destroy_Task()))
        self.settings["datastore"] = directory.name
        provider = await self.started()
        await self.launched(provider, 2)
        self.assertEqual(self.chosen(), [self.hosts[1].name] * 2)
        await self.within(gatherResults([provider.destroy(vm.name) for vm in self.world.vms()]))
        await self.until(self.world.has_deleted, "vCenter has deleted what it has taken")
        del self.settings["datastore"]  # does not exist any more when the test looks for leftovers

    async def test_each_hosts_reason_is_told_if_none_can_run_a_vm(self) -> None:
        provider = await self.started()
        for host in self.hosts:
            self.undone(host.DisconnectHost_Task, host.ReconnectHost_Task)
        error = str(await self.refused(ResourceExhausted, provider.launch(self.spec())))
        for host in self.hosts:
            self.assertIn(f"{host.name} is not connected", error)
        self.assertEqual(self.world.vms(), [])

    async def test_a_host_that_leaves_is_chosen_no_more(self) -> None:
        """vCenter refuses the first clone, as the list of hosts is outdated; the next one reads it anew."""
        provider = await self.started()
        first = self.hosts[0]
        self.undone(first.DisconnectHost_Task, first.ReconnectHost_Task)
        await self.launched(provider, 3)
        self.assertEqual(len(self.world.vms()), 3)
        self.assertNotIn(first.name, [vm.runtime.host.name for vm in self.world.vms()])

    async def test_a_host_that_looks_fit_and_refuses_comes_last(self) -> None:
        """Such as one entering maintenance mode: it has the most free memory, as its VMs are moved away."""
        provider = await self.started()
        large = {"infranetes.io/instance-type": "1cpu-65536mib"}
        await self.within(gatherResults([provider.launch(self.spec(annotations=large)) for _ in range(2)]))
        [emptying] = {host.name for host in self.hosts} - set(self.chosen())
        self.world.hosts.emptying.add(emptying)
        await self.launched(provider)
        await self.launched(provider)
        self.assertEqual(self.chosen().count(emptying), 1)
        self.assertNotIn(emptying, [vm.runtime.host.name for vm in self.world.vms()])

    async def test_where_all_have_refused_the_first_that_did_is_tried_again(self) -> None:
        provider = await self.started()
        names = {host.name for host in self.hosts}
        self.world.hosts.emptying |= names
        call = provider.launch(self.spec())
        while len(self.chosen()) < 3:
            await deferLater(reactor, 0.02, lambda: None)
        self.world.hosts.emptying.clear()
        await self.within(call)
        self.assertEqual(set(self.chosen()[:3]), names)


class DeploymentHostTests(HostsCase, LibraryCase, TestCase):
    """Items of a content library."""

    async def test_both_kinds_of_items_are_deployed_to_a_host(self) -> None:
        self.library.put_ovf("web-1.0")
        self.put_template("db-1.0")
        provider = await self.started()
        for name in ("web:1.0", "db:1.0"):
            await self.had(provider, name)
        self.assertEqual(self.made(), ["db-1.0", "web-1.0"])
        names = {host._moId for host in self.hosts}
        for each in self.world.asked(DEPLOY):
            self.assertTrue(any(f'"{name}"' in each["body"] for name in names), each["body"])
