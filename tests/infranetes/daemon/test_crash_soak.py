# SPDX-License-Identifier: Apache-2.0
"""Soak tests: pods run and end while their daemon is killed at each write in turn."""

from __future__ import annotations

import secrets

import attrs
from twisted.trial.unittest import TestCase

from infranetes.identity.authority import Authority
from infranetes_common.identity import Identity
from infranetes_common.reactors import installed
from infranetes_common.wire import cri
from tests.harness.days import today
from tests.harness.durations import slow
from tests.harness.needs import needs_registry, nightly
from tests.infranetes.daemon.case import DaemonCase
from tests.support.clouds import moto, tls, vcsim
from tests.support.crash_soak import LABELS, LASTING, CrashSoak, Outcome
from tests.support.fault_rotation import ALL
from tests.support.infrastructure import FAULTY, SOUND
from tests.support.kubelet_calls import Runtime

SECONDS = 15.0  # plus the time for pods that run then; `python -m bench lives` runs 200 pods on each
SHORT_SECONDS = 3.0
PATIENCE = 240.0  # more, while there are kinds of writes at which no daemon was killed


class SoakCase(TestCase):
    """With a pool that is often empty, so that pods both claim VMs and have their own launched."""

    timeout = 600

    async def soak(
        self,
        infrastructure: str,
        width: int,
        pool: int,
        patience: float = 0.0,
        seconds: float = SECONDS,
        stopped: int = 0,
    ) -> Outcome:
        """Run as many pods as the time allows."""
        soak = CrashSoak(
            installed(),
            pods=1000,
            width=width,
            pool=pool,
            seconds=seconds,
            patience=patience,
            seed=today(),
            infrastructure=SOUND[infrastructure],
            stopped=stopped,
        )
        self.addCleanup(soak.clean)
        outcome = await soak.run()
        self.assertEqual(outcome.lost, [], soak.log)
        self.assertEqual(outcome.leaked, [], soak.log)
        self.assertEqual(outcome.lasted, LASTING, "pods that ran all the time")
        self.assertGreaterEqual(outcome.pods, width, "one pod at each of the places side by side")
        self.assertGreater(outcome.kills, 0)
        return outcome


@slow(5, "the daemon is killed time and again")
@needs_registry
class ShortSoakTests(SoakCase):
    async def test_no_vm_leaks_and_no_pod_is_lost(self) -> None:
        await self.soak("simulated", width=4, pool=1, seconds=SHORT_SECONDS, stopped=2)


@nightly
class CrashSoakTests(SoakCase):
    @classmethod
    def setUpClass(cls) -> None:
        moto.shared()  # each takes a moment, but only once
        vcsim.shared()
        tls.certificate()

    async def test_no_vm_leaks_and_no_pod_is_lost(self) -> None:
        outcome = await self.soak("simulated", width=4, pool=2, patience=PATIENCE, stopped=2)
        self.assertEqual(outcome.missed, [], "kinds of writes at which no daemon was killed")
        self.assertGreaterEqual(outcome.kills, len(LABELS))

    async def test_no_vm_address_or_disk_leaks_on_aws(self) -> None:
        await self.soak("aws", width=6, pool=1, stopped=2)

    async def test_no_vm_or_disk_leaks_on_gcp(self) -> None:
        await self.soak("gcp", width=6, pool=1)

    async def test_no_vm_leaks_on_vsphere(self) -> None:
        await self.soak("vsphere", width=6, pool=1)


class LosingSoak(CrashSoak):
    """A soak whose pods, or only their containers, another client removes too early."""

    def __init__(self, what: str) -> None:
        super().__init__(installed(), pods=0, seconds=0.0)
        self._what = what

    async def _end(self, name: str, sandbox: str, container: str) -> None:
        async def lose(runtime: Runtime) -> None:
            if self._what == "pod":
                await runtime.RemovePodSandbox(
                    cri.RemovePodSandboxRequest(pod_sandbox_id=sandbox), timeout=30.0
                )
            else:
                await runtime.RemoveContainer(
                    cri.RemoveContainerRequest(container_id=container), timeout=30.0
                )

        await self._ask(lose)
        await super()._end(name, sandbox, container)


@nightly
class LossTests(TestCase):
    """The soak test detects lost pods."""

    timeout = 300

    async def test_what_is_gone_before_it_was_asked_to_go_is_lost(self) -> None:
        for what in ("pod", "container"):
            soak = LosingSoak(what)
            self.addCleanup(soak.clean)
            outcome = await soak.run()
            self.assertEqual(outcome.lasted, 0)
            self.assertEqual(len(outcome.lost), LASTING)
            for message in outcome.lost:
                self.assertIn("is gone before StopContainer", message)


@nightly
class FaultySoakTests(TestCase):
    """The same on clouds with all kinds of faults; one cloud a day, as each takes minutes."""

    timeout = 900

    @classmethod
    def setUpClass(cls) -> None:
        CrashSoakTests.setUpClass()

    async def soak(self, infrastructure: str) -> None:
        """Run 16 pods; each fault has to happen at least once."""
        faulty = FAULTY[infrastructure]
        soak = CrashSoak(installed(), pods=16, width=6, seed=today(), infrastructure=faulty)
        self.addCleanup(soak.clean)
        outcome = await soak.run()
        self.assertEqual(outcome.lost, [], soak.log)
        self.assertEqual(outcome.leaked, [], soak.log)
        self.assertEqual((outcome.pods, outcome.lasted), (16, LASTING))
        self.assertGreater(outcome.kills, 0)
        self.assertEqual([each for each in ALL if not outcome.faults[each]], [], outcome.faults)

    async def test_on_the_cloud_of_the_day(self) -> None:
        await self.soak(sorted(FAULTY)[today() % len(FAULTY)])


@needs_registry
class SweepTests(DaemonCase):
    """The daemon removes its own stray VMs and no others."""

    async def stray(self, cluster: str, node: str) -> str:
        """Add a VM with those tags that has no record. Return its id."""
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
        for _ in range(2):  # the second is found by passes that begin after the first has ended
            ours = await self.stray("blue", "n1")
            while ours in await self.ids():
                await self.sleep(0.1)  # trial's timeout ends this
        left = await self.ids()
        self.assertLessEqual(others, left)
        self.assertEqual(len(left), 4)
        self.assertEqual([one.id for one in await self.sandboxes()], [sandbox])

    async def test_a_vm_ended_from_outside_is_a_pod_that_is_not_ready(self) -> None:
        await self.start()
        sandbox, other = await self.run_pod("lost"), await self.run_pod("kept")
        vm = next(vm for vm in await self.vms() if vm["sandbox_id"] == sandbox)
        await self.farm("end", id=vm["id"])  # the daemon is not notified
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
