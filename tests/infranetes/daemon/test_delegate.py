# SPDX-License-Identifier: Apache-2.0
"""The daemon in front of a node's own runtime: one socket for the pods of both, whichever is killed."""

from __future__ import annotations

import json
from typing import Any

from twisted.internet.endpoints import UNIXClientEndpoint

from infranetes_common.concurrency import settled, start
from infranetes_common.wire import cri
from infranetes_common.wire.cri_rpcs import RuntimeStub
from tests.harness.needs import needs_mounts, needs_registry
from tests.infranetes.daemon.case import DaemonCase, reactor
from tests.support.delegate import FakeDelegate
from tests.support.waiting import listens, until
from txgrpc import Channel, Code


class DelegateCase(DaemonCase):
    """The delegate runs in the test's own process."""

    timeout = 300
    patience = 2.0

    def setUp(self) -> None:
        super().setUp()
        self.theirs = FakeDelegate(str(self.root / "theirs.sock"))
        self.addCleanup(self.theirs.down)
        self.config["delegate"] = {"socket": f"unix://{self.theirs.path}"}
        self.config["imgprovider"] = "systemd"  # its images are not the delegate's

    async def run_ours(self, name: str = "ours") -> str:
        request = cri.RunPodSandboxRequest(config=self.pod(name), runtime_handler="infranetes")
        return str((await self.runtime.RunPodSandbox(request, timeout=60.0)).pod_sandbox_id)

    async def ids(self) -> set[str]:
        return {each.id for each in await self.sandboxes()}

    async def status(self, id: str) -> Any:
        request = cri.PodSandboxStatusRequest(pod_sandbox_id=id)
        return (await self.runtime.PodSandboxStatus(request, timeout=10.0)).status


@needs_mounts
@needs_registry
class DelegateTests(DelegateCase):
    async def test_pods_of_both(self) -> None:
        await self.theirs.start()
        await self.start()
        theirs, ours = await self.run_pod("theirs"), await self.run_ours()
        self.assertEqual((len(theirs), len(ours)), (64, 32))
        self.assertEqual(await self.ids(), {theirs, ours})
        self.assertEqual((await self.status(theirs)).metadata.name, "theirs")
        self.assertEqual((await self.status(ours[:6])).metadata.name, "ours")
        version = await self.runtime.Version(cri.VersionRequest(), timeout=10.0)
        self.assertEqual(version.runtime_name, "containerd")
        status = await self.runtime.Status(cri.StatusRequest(verbose=True), timeout=10.0)
        self.assertEqual([each.name for each in status.runtime_handlers], ["", "runc", "infranetes"])
        delegate = json.loads(status.info["infranetes"])["delegate"]
        self.assertEqual((delegate["state"], delegate["kind"]), ("up", "containerd"))
        for id in (theirs, ours):
            await self.stop_pod(id)
            await self.remove_pod(id)
        self.assertEqual(await self.ids(), set())
        self.assertEqual(await self.vms(), [])
        # Removed a second time: by now, the daemon knows neither pod.
        await self.remove_pod(ours)

    async def test_events_of_both_in_one_stream(self) -> None:
        await self.theirs.start()
        await self.start()
        events = self.runtime.GetContainerEvents(cri.GetEventsRequest(), timeout=60)
        self.addCleanup(events.cancel)
        await until(lambda: bool(self.theirs.listeners), "the delegate is listened to", 60.0)
        self.theirs.tell(cri.ContainerEventResponse(container_id="f" * 64))
        self.assertEqual((await events.__anext__()).container_id, "f" * 64)
        ours = await self.run_ours()
        self.assertEqual((await events.__anext__()).container_id, ours)

    async def test_whichever_is_killed_pods_of_both_stay(self) -> None:
        await self.theirs.start()
        await self.start()
        theirs, ours = await self.run_pod("theirs"), await self.run_ours()
        await self.theirs.down()
        self.assertEqual((await self.status(ours)).metadata.name, "ours")
        message = await self.refused(Code.UNAVAILABLE, self.sandboxes())
        self.assertIn(f"the delegate at {self.theirs.path} does not answer", message)
        another = await self.run_ours("another")
        await self.kill()
        await self.theirs.start()
        await self.start()
        self.assertEqual(await self.ids(), {theirs, ours, another})
        self.theirs.hang("ExecSync")
        request = cri.ExecSyncRequest(container_id="f" * 64)
        calls = [start(self.given_up(self.runtime.ExecSync(request, timeout=60.0))) for _ in range(100)]
        await until(lambda: len(self.theirs.hanging["ExecSync"]) == 100, "the delegate has all calls", 60.0)
        await self.kill()
        await settled(calls)
        await until(
            lambda: len(self.theirs.cancelled) == 100, "the delegate was told that nobody waits", 60.0
        )
        await self.start()
        self.assertEqual(await self.ids(), {theirs, ours, another})
        self.assertEqual(len(await self.vms()), 2)

    async def given_up(self, call: Any) -> None:
        await self.refused(Code.UNAVAILABLE, call)


class BeforeTests(DelegateCase):
    """What is served before the daemon's own services are ready."""

    async def test_a_provider_that_can_not_start_fails_no_pod_of_theirs(self) -> None:
        await self.theirs.start()
        self.config["provider"] = "qemu"
        self.config["providers"] = {"qemu": {"image_dir": str(self.root / "nothing")}}
        self.process = self.spawn()
        await until(lambda: listens(self.socket) or not self.alive, "the daemon serves", 60.0)
        self.assertTrue(self.alive, self.log)
        self.channel = Channel(reactor, UNIXClientEndpoint(reactor, str(self.socket)))
        self.runtime = RuntimeStub(self.channel)
        status = await self.runtime.Status(cri.StatusRequest(), timeout=30.0)
        told = {each.type: each.status for each in status.status.conditions}
        self.assertEqual((told["RuntimeReady"], told["InfranetesProvider"]), (True, False))
        theirs = await self.run_pod("theirs")
        self.assertEqual(await self.ids(), {theirs})
        ours = cri.RunPodSandboxRequest(config=self.pod("ours"), runtime_handler="infranetes")
        await self.refused(Code.UNAVAILABLE, self.runtime.RunPodSandbox(ours, timeout=30.0))
        await self.until(lambda: "can't start" in self.log, "it is final")
        self.assertEqual(await self.ids(), {theirs})
        self.assertTrue(self.alive)

    async def test_it_waits_for_a_delegate_that_is_not_there_yet(self) -> None:
        self.process = self.spawn()
        until_connected = start(self.connect())
        await until(lambda: listens(self.socket), "the daemon serves", 60.0)
        await self.theirs.start()
        await until_connected
        self.assertEqual(await self.ids(), set())
