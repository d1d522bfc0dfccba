# SPDX-License-Identifier: Apache-2.0
"""PostgreSQL on a volume loses no acknowledged transaction, however its VM ends.

pgbench runs outside of the VM and records which commits are acknowledged. The VM is killed in the middle, the
pod is made anew with the same volume, and every acknowledged transaction must be there once PostgreSQL has
recovered from its log. Every other time the power is lost as well, so that only flushed content of the volume
is left. `INFRANETES_TEST_KILLS=50` repeats that so often. Each time a line of JSON with figures is added to
the file `INFRANETES_TEST_FIGURES`.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from twisted.internet.threads import deferToThread

from infranetes_common.wire import cri
from tests.e2e.volume_case import VolumeCase
from tests.harness.durations import slow
from tests.support.postgresql import CHECK, SERVE, Client, Load, PostgresqlTree, lost
from tests.support.power_loss import VolatileFile
from tests.support.registry import Registry

KILLS = int(os.environ.get("INFRANETES_TEST_KILLS", "2"))
FIGURES = os.environ.get("INFRANETES_TEST_FIGURES", "")
_CACHE = Path(__file__).resolve().parents[2] / "build" / "postgresql"
_CLIENTS = 4
_DONE = "SELECT run, client, count(*), max(number) FROM done GROUP BY run, client"
_INVARIANT = (
    "SELECT (SELECT sum(abalance) FROM pgbench_accounts), (SELECT sum(tbalance) FROM pgbench_tellers), "
    "(SELECT sum(bbalance) FROM pgbench_branches), (SELECT coalesce(sum(delta), 0) FROM pgbench_history), "
    "(SELECT count(*) FROM pgbench_history), (SELECT count(*) FROM done)"
)


@slow(200, "its VMs are emulated where there is no KVM")
class PostgresqlTests(VolumeCase):
    """PostgreSQL on a volume of 512 MiB.

    :ivar acknowledged: how many commits of each client were acknowledged before the last VM ended.
    :ivar killed: how that VM ended."""

    timeout = 300 + 120 * KILLS
    size = 512 << 20

    def setUp(self) -> None:
        super().setUp()
        self.acknowledged: Mapping[int, int] = {}
        self.killed: dict[str, object] = {}

    async def set_up_image(self) -> None:
        self.postgresql = await deferToThread(PostgresqlTree.made, _CACHE)
        registry = await deferToThread(Registry().start)
        self.addCleanup(deferToThread, registry.stop)
        image = await deferToThread(lambda: registry.push("postgresql", "15", self.postgresql.image()))
        self.reference = image
        self.config["images"] = {"insecure_registries": [registry.host]}
        await self.start()
        pull = cri.PullImageRequest(image=cri.ImageSpec(image=image))
        await self.image_service.PullImage(pull, timeout=300.0)

    async def serving(self, attempt: int) -> Client:
        """Make the pod anew, and wait until its PostgreSQL answers."""
        self.pod_id = await self.run_pod("web", attempt=attempt)
        source = self.publish(f"pod-{attempt}")
        name = self.log_name = f"main-{attempt}"
        self.server = await self.run_container(self.pod_id, self.of_image(name, source, SERVE))
        request = cri.PodSandboxStatusRequest(pod_sandbox_id=self.pod_id)
        address = (await self.runtime.PodSandboxStatus(request, timeout=30.0)).status.network.ip
        await self.until(lambda: self.said("ready to accept connections"), "it serves", seconds=60.0)
        return Client(self.postgresql, address)

    def said(self, words: str) -> bool:
        """Return whether the log of the present server has these words."""
        return any(words in line for line in self.lines(self.log_name))

    def of_image(self, name: str, source: Path, script: str) -> cri.ContainerConfig:
        return self.mounting(source, name, script, image=cri.ImageSpec(image=self.reference))

    async def test_no_acknowledged_transaction_is_lost(self) -> None:
        await self.set_up_image()
        await self.fill(await self.serving(0))
        for kill in range(1, KILLS + 1):
            await self.kill_in_the_middle(kill, power=kill % 2 == 0)
        client = await self.recovered(KILLS + 1)
        await self.check_everything(client)

    async def fill(self, client: Client) -> None:
        """Make the tables that the load needs, and stop the pod."""
        making = await deferToThread(client.run, "pgbench", "-i", "-q", client.place)
        self.assertEqual(making.returncode, 0, making.stderr)
        table = "CREATE TABLE done (run int, client int, number int, PRIMARY KEY (run, client, number))"
        await deferToThread(client.query, table)
        await self.end_pod()

    async def end_pod(self) -> None:
        await self.stop_pod(self.pod_id)
        await self.remove_pod(self.pod_id)

    async def kill_in_the_middle(self, kill: int, *, power: bool) -> None:
        """Check that the pod has all that was acknowledged before, then kill its VM while it is busy."""
        disk = await deferToThread(VolatileFile, self.file, self.root / "volatile") if power else None
        try:
            load = Load(self.postgresql, await self.recovered(kill), kill, _CLIENTS)
            try:
                await self.end_while_busy(load, kill, disk)
            finally:
                load.end()
            await self.end_pod()
            if disk is not None:
                await deferToThread(disk.lose_power)
                self.killed["flushes"] = disk.flushes
        finally:
            if disk is not None:
                disk.end()

    async def end_while_busy(self, load: Load, kill: int, disk: VolatileFile | None) -> None:
        """Kill the VM, and record how many commits of each client were acknowledged."""
        began = time.monotonic()
        await self.until(lambda: load.seconds or load.ended, "transactions are done", seconds=60.0)
        await self.sleep(0.3 + kill * 0.37 % 3)
        self.assertFalse(load.ended, load.output)
        if disk is not None:
            disk.fail()  # before QEMU ends, which would flush it on closing
        os.kill(self.qemu_of(self.pod_id), signal.SIGKILL)
        seconds = time.monotonic() - began
        await self.until(lambda: load.ended, "the clients have noticed", seconds=60.0)
        self.acknowledged = load.acknowledged()
        told = sum(self.acknowledged.values())
        self.assertGreater(told, 0, load.output)
        self.killed = {"kill": kill, "power": disk is not None, "acknowledged": told,
                      "tps": round(told / seconds, 1), "load": os.getloadavg()[0]}  # fmt: skip

    async def recovered(self, attempt: int) -> Client:
        """Make the pod anew, and check that it has all that was acknowledged before the last kill."""
        began = time.monotonic()
        client = await self.serving(attempt)
        if not self.killed:
            return client
        seconds = round(time.monotonic() - began, 1)
        self.assertTrue(self.said("automatic recovery in progress"), self.lines(self.log_name))
        rows = await deferToThread(client.query, _DONE)
        missing = lost(self.acknowledged, [row[1:] for row in rows if row[0] == str(self.killed["kill"])])
        self.note(**self.killed, lost=missing, until_it_serves=seconds)
        self.assertEqual(missing, [])
        await self.check_balance(client)
        return client

    async def check_balance(self, client: Client) -> None:
        """Check that each transaction is there as a whole, or not at all."""
        [found] = await deferToThread(client.query, _INVARIANT)
        accounts, tellers, branches, deltas, history, done = map(int, found)
        self.assertEqual({accounts, tellers, branches}, {deltas})
        self.assertEqual(history, done)

    async def check_everything(self, client: Client) -> None:
        """Make all checks that PostgreSQL itself has: of indexes and tables, and of each page's checksum."""
        looking = ("pg_amcheck", "--install-missing", "--heapallindexed", client.place)
        checked = await deferToThread(client.run, *looking)
        self.assertEqual((checked.returncode, checked.stdout), (0, ""), checked.stderr)
        stop = cri.StopContainerRequest(container_id=self.server, timeout=60)
        await self.runtime.StopContainer(stop, timeout=120.0)
        last = self.of_image("check", self.published, CHECK)
        status = await self.in_state(await self.run_container(self.pod_id, last), cri.CONTAINER_EXITED)
        await self.until(lambda: any("Bad checksums" in line for line in self.lines("check")), "its log")
        self.assertEqual(status.exit_code, 0, self.lines("check"))
        self.assertTrue(any(line.split() == ["Bad", "checksums:", "0"] for line in self.lines("check")))
        await self.end_pod()

    def note(self, **figures: object) -> None:
        if FIGURES:
            with open(FIGURES, "a") as file:
                file.write(json.dumps(figures) + "\n")
