"""Pods' whole lives under a daemon that is killed at one write after the other."""

from __future__ import annotations

import secrets

import attrs
from twisted.internet import reactor
from twisted.trial.unittest import TestCase

from infranetes.authority import Authority
from infranetes_common import cri
from infranetes_common.identity import Identity
from tests.infranetes.daemon.case import DaemonCase
from tests.support.clouds import moto, tls, vcsim
from tests.support.grounds import GROUNDS
from tests.support.lifecycles import Lifecycles

SECONDS = 15.0  # plus what is under way then; `python -m bench lives` lives 200 on each


class LifecycleTests(TestCase):
    """With a pool that is often empty, so that pods both claim VMs and have their own launched."""

    timeout = 600

    @classmethod
    def setUpClass(cls) -> None:
        moto.shared()  # each takes a moment, once
        vcsim.shared()
        tls.certificate()

    async def lives(self, ground: str, width: int, pool: int) -> None:
        """As many as there is time for."""
        make = GROUNDS[ground]
        lives = Lifecycles(reactor, pods=60, width=width, pool=pool, seconds=SECONDS, seed=1, ground=make)
        self.addCleanup(lives.clean)
        outcome = await lives.run()
        self.assertEqual(outcome.lost, [], lives.log)
        self.assertEqual(outcome.leaked, [], lives.log)
        self.assertGreater(outcome.pods, 0)
        self.assertGreater(outcome.kills, 0)

    async def test_no_vm_leaks_and_no_pod_is_lost(self) -> None:
        await self.lives("simulated", width=4, pool=2)

    async def test_no_vm_address_or_disk_leaks_on_aws(self) -> None:
        await self.lives("aws", width=6, pool=1)

    async def test_no_vm_or_disk_leaks_on_gcp(self) -> None:
        await self.lives("gcp", width=6, pool=1)

    async def test_no_vm_leaks_on_vsphere(self) -> None:
        await self.lives("vsphere", width=6, pool=1)


class SweepTests(DaemonCase):
    """What is ours is ours, and nothing else is."""

    async def stray(self, cluster: str, node: str) -> str:
        """A VM with those tags that no record knows; its id."""
        sandbox, token = secrets.token_hex(16), secrets.token_hex(16)
        authority = Authority(self.root / "other")
        certificate, key = authority.issue_vm(sandbox, 3600)
        identity = Identity(sandbox, certificate, key, authority.ca_pem)
        tags = {"cluster": cluster, "node": node, "token": token, "address": "10.89.9.9"}
        await self.farm("boot", id=f"sim-{token}", identity=attrs.asdict(identity), tags=tags)
        return f"sim-{token}"

    async def ids(self) -> set[str]:
        return {vm["id"] for vm in await self.vms()}

    async def test_it_ends_no_vm_of_another_cluster_or_node(self) -> None:
        self.config.update(times={"sweep": 0.2}, cluster="blue", node="n1")
        await self.start()
        sandbox = await self.run_pod()
        others = {await self.stray("green", "n1"), await self.stray("blue", "n2"), await self.stray("", "")}
        ours = await self.stray("blue", "n1")
        for _ in range(200):
            if ours not in await self.ids():
                break
            await self.sleep(0.1)
        await self.sleep(1.0)  # some more passes
        left = await self.ids()
        self.assertNotIn(ours, left)
        self.assertLessEqual(others, left)
        self.assertEqual(len(left), 4)
        self.assertEqual([one.id for one in await self.sandboxes()], [sandbox])

    async def test_a_vm_ended_from_outside_is_a_pod_that_is_not_ready(self) -> None:
        await self.start()
        sandbox, other = await self.run_pod("lost"), await self.run_pod("kept")
        vm = next(vm for vm in await self.vms() if vm["sandbox_id"] == sandbox)
        await self.farm("end", id=vm["id"])  # the farm tells nobody
        await self.restart()
        states = {}
        for _ in range(200):
            states = {one.id: one.state for one in await self.sandboxes()}
            if states[sandbox] == cri.SANDBOX_NOTREADY:
                break
            await self.sleep(0.1)
        self.assertEqual(states, {sandbox: cri.SANDBOX_NOTREADY, other: cri.SANDBOX_READY})
        await self.remove_pod(sandbox)
        await self.remove_pod(other)
        self.assertEqual(await self.vms(), [])
