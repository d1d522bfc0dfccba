# SPDX-License-Identifier: Apache-2.0
"""PostgreSQL on a volume loses no acknowledged transaction, however its VM ends.

pgbench runs outside of the VM and notes what it is told is committed. Its VM is killed in the middle, the pod
is made anew with the same volume, and what was acknowledged has to be there, once PostgreSQL has recovered by
its log. Every other time the power is lost as well: of the volume's content only what was flushed is left.
With `INFRANETES_TEST_KILLS=50` that is done so often. Figures are added to the file
`INFRANETES_TEST_FIGURES`, as a line of JSON for each time.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from twisted.internet.threads import deferToThread

from infranetes_common.wire import cri
from tests.e2e.volume_case import VolumeCase
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


class PostgresqlTests(VolumeCase):
    """With a volume of 512 MiB."""

    timeout = 300 + 120 * KILLS
    size = 512 << 20

    async def set_up_image(self) -> None:
        self.tree = await deferToThread(PostgresqlTree.made, _CACHE)
        registry = await deferToThread(Registry().start)
        self.addCleanup(deferToThread, registry.stop)
        image = await deferToThread(lambda: registry.push("postgresql", "15", self.tree.image()))
        self.reference = image
        self.config["images"] = {"insecure_registries": [registry.host]}
        await self.start()
        pull = cri.PullImageRequest(image=cri.ImageSpec(image=image))
        await self.image_service.PullImage(pull, timeout=300.0)

    async def serving(self, attempt: int) -> Client:
        """Make the pod anew; return once its PostgreSQL answers."""
        self.pod_id = await self.run_pod("web", attempt=attempt)
        source = self.publish(f"pod-{attempt}")
        self.server = await self.run_container(self.pod_id, self.of_image("main", source, SERVE, attempt))
        request = cri.PodSandboxStatusRequest(pod_sandbox_id=self.pod_id)
        address = (await self.runtime.PodSandboxStatus(request, timeout=30.0)).status.network.ip
        client = Client(self.tree, address)
        until = time.monotonic() + 180.0
        while (await deferToThread(client.run, "pg_isready", "-d", client.place)).returncode:
            self.assertLess(time.monotonic(), until, self.lines("main")[-20:])
            await self.sleep(0.2)
        return client

    def of_image(self, name: str, source: Path, script: str, attempt: int) -> Any:
        image = cri.ImageSpec(image=self.reference)
        return self.mounting(source, name, script, attempt=attempt, image=image)

    async def test_no_acknowledged_transaction_is_lost(self) -> None:
        await self.set_up_image()
        client = await self.serving(0)
        making = await deferToThread(client.run, "pgbench", "-i", "-q", client.place)
        self.assertEqual(making.returncode, 0, making.stderr)
        table = "CREATE TABLE done (run int, client int, number int, PRIMARY KEY (run, client, number))"
        await deferToThread(client.query, table)
        await self.end_pod()
        for kill in range(1, KILLS + 1):
            await self.kill_in_the_middle(kill, power=kill % 2 == 0)
        await self.check_everything()

    async def end_pod(self) -> None:
        await self.stop_pod(self.pod_id)
        await self.remove_pod(self.pod_id)

    async def kill_in_the_middle(self, kill: int, *, power: bool) -> None:
        """Have the VM killed while it is busy; and compare what the next has with what was acknowledged."""
        disk = await deferToThread(VolatileFile, self.file, self.root / "volatile") if power else None
        try:
            load = Load(self.tree, await self.serving(2 * kill - 1), kill, _CLIENTS)
            try:
                acknowledged, seconds = await self.killed(load, kill, disk)
            finally:
                load.end()
            await self.end_pod()
            if disk is not None:
                await deferToThread(disk.lose_power)
        finally:
            if disk is not None:
                disk.end()
        began = time.monotonic()
        client = await self.serving(2 * kill)
        again = time.monotonic() - began
        self.assertIn("automatic recovery in progress", "\n".join(self.lines("main")))
        rows = await deferToThread(client.query, _DONE)
        missing = lost(acknowledged, [row[1:] for row in rows if row[0] == str(kill)])
        told = sum(acknowledged.values())
        self.note(
            kill=kill,
            power=power,
            acknowledged=told,
            lost=missing,
            seconds=seconds,
            tps=round(told / seconds, 1),
            flushes=disk.flushes if disk is not None else None,
            until_it_serves=round(again, 1),
            load=os.getloadavg()[0],
        )
        self.assertEqual(missing, [])
        await self.check_balance(client)
        await self.end_pod()

    async def killed(self, load: Load, kill: int, disk: VolatileFile | None) -> tuple[Any, float]:
        """Kill the VM; return what was acknowledged by each client, and for how long it ran."""
        began = time.monotonic()
        await self.until(lambda: load.seconds or load.ended, "transactions are done", seconds=60.0)
        await self.sleep(0.3 + kill * 0.37 % 3)
        self.assertFalse(load.ended, load.output)
        if disk is not None:
            disk.fail()  # first, or it would be flushed when QEMU closes it
        os.kill(self.qemu_of(self.pod_id), signal.SIGKILL)
        seconds = time.monotonic() - began
        await self.until(lambda: load.ended, "the clients have noticed", seconds=60.0)
        acknowledged = load.acknowledged()
        self.assertGreater(sum(acknowledged.values()), 0, load.output)
        return acknowledged, round(seconds, 1)

    async def check_balance(self, client: Client) -> None:
        """Each transaction is there as a whole, or not at all."""
        [found] = await deferToThread(client.query, _INVARIANT)
        accounts, tellers, branches, deltas, history, done = map(int, found)
        self.assertEqual({accounts, tellers, branches}, {deltas})
        self.assertEqual(history, done)

    async def check_everything(self) -> None:
        """What PostgreSQL itself can say: of indexes and tables, and of each page's checksum."""
        client = await self.serving(2 * KILLS + 1)
        looking = ("pg_amcheck", "--install-missing", "--heapallindexed", client.place)
        checked = await deferToThread(client.run, *looking)
        self.assertEqual((checked.returncode, checked.stdout), (0, ""), checked.stderr)
        stop = cri.StopContainerRequest(container_id=self.server, timeout=60)
        await self.runtime.StopContainer(stop, timeout=120.0)
        last = self.of_image("check", self.published, CHECK, 0)
        status = await self.in_state(await self.run_container(self.pod_id, last), cri.CONTAINER_EXITED)
        await self.until(lambda: any("Bad checksums" in line for line in self.lines("check")), "its log")
        self.assertEqual(status.exit_code, 0, self.lines("check"))
        self.assertTrue(any(line.split() == ["Bad", "checksums:", "0"] for line in self.lines("check")))
        await self.end_pod()

    def note(self, **figures: Any) -> None:
        if FIGURES:
            with open(FIGURES, "a") as file:
                file.write(json.dumps(figures) + "\n")
