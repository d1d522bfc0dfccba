# SPDX-License-Identifier: Apache-2.0
"""The daemon is killed around every write to its store, at every step of a pod's life."""

from __future__ import annotations

import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path

from infranetes.pods.store.store import FILE
from infranetes_common.wire import cri
from tests.harness.durations import slow
from tests.harness.needs import needs_netns, needs_registry, repetitions
from tests.infranetes.daemon.case import DaemonCase
from tests.infranetes.daemon.hostports import drop_table, free_port, host_port, in_kernel, route_to_pods
from txgrpc import Code, GrpcError

Step = Callable[[], Awaitable[object]]


@slow(10, "a pod lives once for every second write to the store, with two daemons each time")
@needs_registry
@needs_netns
class CrashTests(DaemonCase):
    """Every retried call succeeds, and in the end nothing is left."""

    timeout = 900

    def setUp(self) -> None:
        super().setUp()
        self.sandbox = self.container = ""
        self.port = free_port()
        self.crashes = 0
        self.addCleanup(drop_table, self.root)
        route_to_pods(self)

    async def test_before_any_write(self) -> None:
        await self.at_each_write("before")

    async def test_after_any_write(self) -> None:
        await self.at_each_write("after")

    async def at_each_write(self, when: str) -> None:
        number = 1
        while True:
            await self.start(crash=(when, number))
            before = self.crashes
            await self.life(f"pod{number}")
            if self.crashes == before:
                break  # there are fewer writes than that in a pod's life
            await self.nothing_is_left()
            await self.kill()
            # By day one of the two tests leaves each state of the store: before a write is after the last.
            number += repetitions(2, nightly=1)
        self.assertGreater(number, 8, "a life has more writes than that")

    async def life(self, name: str) -> None:
        """Make every call of a pod's life. A call during which the daemon dies is retried with the next."""
        config = self.box(script="trap 'exit 5' TERM; while :; do sleep 0.1; done")

        async def run() -> None:
            found = [each.id for each in await self.sandboxes(label_selector={"name": name})]
            self.sandbox = (
                found[0]
                if found
                else await self.run_pod(name, labels={"name": name}, port_mappings=[host_port(self.port)])
            )

        async def create() -> None:
            found = [each.id for each in await self.containers(pod_sandbox_id=self.sandbox)]
            self.container = found[0] if found else await self.create(self.sandbox, config)

        async def start() -> None:
            status = await self.container_status(self.container)
            if status.state != cri.CONTAINER_RUNNING:
                request = cri.StartContainerRequest(container_id=self.container)
                await self.runtime.StartContainer(request, timeout=20.0)

        async def running() -> None:
            await self.in_state(self.container, cri.CONTAINER_RUNNING)
            request = cri.ExecSyncRequest(container_id=self.container, cmd=["true"], timeout=10)
            await self.runtime.ExecSync(request, timeout=20.0)

        async def stop() -> None:
            request = cri.StopContainerRequest(container_id=self.container, timeout=10)
            await self.runtime.StopContainer(request, timeout=20.0)
            status = await self.in_state(self.container, cri.CONTAINER_EXITED)
            self.assertEqual(status.exit_code, 5)

        async def remove() -> None:
            request = cri.RemoveContainerRequest(container_id=self.container)
            await self.runtime.RemoveContainer(request, timeout=20.0)
            self.assertEqual(await self.containers(), [])

        async def stop_pod() -> None:
            await self.stop_pod(self.sandbox)
            self.assertEqual(await self.vms(), [])
            self.assertEqual(in_kernel(self.root), "")

        async def remove_pod() -> None:
            await self.remove_pod(self.sandbox)
            self.assertEqual(await self.sandboxes(), [])

        for step in (run, create, start, running, stop, remove, stop_pod, remove_pod):
            await self.surely(step)
            await self.one_vm_at_most()

    async def surely(self, step: Step) -> None:
        for _ in range(3):
            try:
                await step()
                return
            except GrpcError as error:
                if error.code is not Code.UNAVAILABLE:
                    raise
                await self.ended()
                self.crashes += 1
                await self.start()
        self.fail(f"{step} is not done after two crashes")

    async def one_vm_at_most(self) -> None:
        """Check that nothing was done twice."""
        if self.alive:
            self.assertLessEqual(len(await self.vms()), 1)

    async def nothing_is_left(self) -> None:
        self.assertEqual(await self.vms(), [])
        self.assertEqual(in_kernel(self.root), "")
        with sqlite3.connect(self.root / "state" / FILE) as store:
            for table in ("sandboxes", "containers", "logs"):
                rows = store.execute(f"SELECT * FROM {table}").fetchall()  # noqa: S608
                self.assertEqual(rows, [], table)
        store.close()


@needs_registry
class KillTests(DaemonCase):
    """The daemon is killed while pods run."""

    async def test_nothing_changes_for_the_pods(self) -> None:
        await self.start()
        sandboxes, containers = [], []
        for name in ("one", "two", "three"):
            sandboxes.append(await self.run_pod(name))
            containers.append(await self.run_container(sandboxes[-1], self.box(script="sleep 1000")))
        ended = await self.run_container(sandboxes[0], self.box("ended", script="exit 7"))
        await self.in_state(ended, cri.CONTAINER_EXITED)
        before = [(await self.container_status(each)).SerializeToString() for each in containers]
        vms = {vm["id"]: vm["port"] for vm in await self.vms()}
        for _ in range(2):
            await self.restart()
            self.assertEqual({each.id for each in await self.sandboxes()}, set(sandboxes))
            for container in containers:
                await self.in_state(container, cri.CONTAINER_RUNNING)
            after = [(await self.container_status(each)).SerializeToString() for each in containers]
            self.assertEqual(after, before)
            self.assertEqual({vm["id"]: vm["port"] for vm in await self.vms()}, vms)
            status = await self.container_status(ended)
            self.assertEqual((status.state, status.exit_code), (cri.CONTAINER_EXITED, 7))
        for sandbox in sandboxes:
            await self.remove_pod(sandbox)
        self.assertEqual(await self.vms(), [])

    async def test_what_happens_meanwhile_is_known_afterwards(self) -> None:
        await self.start()
        lost, kept = await self.run_pod("lost"), await self.run_pod("kept")
        gone = await self.run_container(lost, self.box(script="sleep 1000"))
        over = self.root / "over"
        script = f"while [ ! -e {over}.now ]; do sleep 0.02; done; touch {over}; exit 9"
        brief = await self.run_container(kept, self.box(script=script))
        await self.kill()
        Path(f"{over}.now").touch()
        vm = next(vm for vm in await self.vms() if vm["sandbox_id"] == lost)
        await self.farm("behave", id=vm["id"], behaviour="dies-after", after=0)
        await self.until(over.exists, "the container ends")
        await self.start()
        status = await self.in_state(brief, cri.CONTAINER_EXITED)
        self.assertEqual(status.exit_code, 9)
        status = await self.in_state(gone, cri.CONTAINER_EXITED)
        self.assertEqual(status.exit_code, 137)
        states = {each.id: each.state for each in await self.sandboxes()}
        self.assertEqual(states, {lost: cri.SANDBOX_NOTREADY, kept: cri.SANDBOX_READY})
        for sandbox in (lost, kept):
            await self.remove_pod(sandbox)
        self.assertEqual(await self.vms(), [])

    async def test_a_vm_of_no_record_is_ended(self) -> None:
        self.config["times"] = {"sweep": 0.3}
        await self.start()
        await self.run_pod()
        await self.kill()
        (self.root / "state" / FILE).unlink()
        for beside in ("-wal", "-shm"):
            (self.root / "state" / (FILE + beside)).unlink(missing_ok=True)
        await self.start()
        self.assertEqual(await self.sandboxes(), [])
        for _ in range(100):
            if not await self.vms():
                break
            await self.sleep(0.1)
        self.assertEqual(await self.vms(), [])

    async def test_a_graceful_end_leaves_the_vms_too(self) -> None:
        await self.start()
        sandbox = await self.run_pod()
        container = await self.run_container(sandbox, self.box(script="sleep 1000"))
        assert self.process is not None
        self.process.terminate()
        await self.ended()
        self.assertFalse(self.socket.exists())
        await self.start()
        await self.in_state(container, cri.CONTAINER_RUNNING)
        self.assertEqual([each.id for each in await self.sandboxes()], [sandbox])
