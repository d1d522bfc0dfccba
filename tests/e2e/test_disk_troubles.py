# SPDX-License-Identifier: Apache-2.0
"""Disks and volumes that are full, fail or lose power, as pods on real VMs see them.

These tests show the rows of the manual's table:

    the node's disk is full                    here
    the node's disk fails                      here
    the volume is full                         here
    it holds something else                    tests.vmserver.volumes.test_disks: "never formatted"
    the VM ended while a file system was made  tests.vmserver.volumes.test_disks_ends: "is made again"
    a VM-image pod's VM reboots                the same: "after a reboot"
    its file system is damaged                 here
    something in the VM still uses it          tests.vmserver.volumes.test_disks: "is used stays"
    QEMU does not detach it                    tests.infranetes.providers.qemu.volumes.test_attached:
                                               "give up"; tests.infranetes.volumes.test_pod_volumes: "hangs"
    the agent does not answer                  the same: "an agent that is away"
    the VM was killed                          here: PostgresqlTests
    the daemon was killed                      tests.infranetes.volumes.test_pod_volumes: KilledAnywhereTests
    a cloud's node is gone                     providers.cloud.volumes.test_volumes: "that is gone"

PostgreSQL on a volume loses no acknowledged transaction, however its VM ends: pgbench runs outside of the VM
and records which commits are acknowledged. The VM is killed in the middle, the pod is made anew with the same
volume, and every acknowledged transaction must be there once PostgreSQL has recovered from its log. Every
other time the power is lost as well, so that only flushed content of the volume is left.
`INFRANETES_TEST_KILLS=50` repeats that so often. Each time a line of JSON with figures is added to the file
`INFRANETES_TEST_FIGURES`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from twisted.internet.endpoints import UNIXClientEndpoint
from twisted.internet.threads import deferToThread

from infranetes.csi.config import CsiConfig
from infranetes_common.wire import cri, csi
from infranetes_common.wire.csi_rpcs import ControllerStub, NodeStub
from tests.e2e import roots
from tests.e2e.pod_case import PodCase
from tests.e2e.volume_case import VolumeCase, VolumeTroubleCase
from tests.harness.durations import slow
from tests.infranetes.csi.case import capability
from tests.infranetes.daemon.case import reactor
from tests.support.postgresql import CHECK, SERVE, Client, Load, lost
from tests.support.power_loss import VolatileFile
from tests.support.registry import Registry
from txgrpc import Channel, Code, GrpcError


class FullDiskTests(PodCase):
    """Full disks, which no ContainerProvider has a part in."""

    async def test_a_pod_fills_its_own_disk_alone(self) -> None:
        """The disk has the usual size, or the one that the pod asks for, whatever room the node has."""
        await self.start()
        greedy = await self.run_pod("greedy")
        large = await self.run_pod("large", annotations={"infranetes.io/disk": "23Gi"})
        of_greedy, of_large = [
            await self.run_container(pod, self.box("sleeper", script="sleep 3600")) for pod in (greedy, large)
        ]
        look = "df -m / | tail -n 1 | awk '{ print $(NF-4) }'"

        async def size(container: str) -> int:
            return int((await self.execute(container, "sh", "-c", look)).stdout)

        usual = await size(of_greedy)
        self.assertTrue(19 << 10 < usual < 20 << 10, usual)
        until = reactor.seconds() + 60.0
        while await size(of_large) < 22 << 10:
            self.assertLess(reactor.seconds(), until, "the file system takes the larger disk")
            await self.sleep(0.5)
        filling = (  # including the blocks reserved for root
            "free=$(df -m / | tail -n 1 | awk '{ print $(NF-4) - $(NF-3) }') && "
            "fallocate -l $(( (free - 64) << 20 )) /fill && "
            "dd if=/dev/zero of=/more bs=1M count=256 conv=fsync"
        )
        full = await self.execute(of_greedy, "sh", "-c", filling)
        self.assertNotEqual(full.exit_code, 0)
        self.assertIn(b"No space left on device", full.stderr)
        wrote = await self.execute(
            of_large, "dd", "if=/dev/urandom", "of=/more", "bs=1M", "count=4", "conv=fsync"
        )
        self.assertEqual(wrote.exit_code, 0, wrote.stderr)
        began = reactor.seconds()
        await self.stop_pod(greedy)
        self.assertLess(reactor.seconds() - began, 15.0)

    async def test_on_a_full_node_writes_fail_in_the_pod_and_it_is_stopped_at_once(self) -> None:
        state = self.root / "state"
        state.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=96m", "tmpfs", str(state)], check=True)
        self.addCleanup(subprocess.run, ["umount", "-l", str(state)], check=True)
        await self.start()
        pod = await self.run_pod()
        main = await self.run_container(pod, self.box(script="sleep 3600"))
        wrote = await self.execute(
            main, "dd", "if=/dev/urandom", "of=/more", "bs=1M", "count=128", "conv=fsync"
        )
        self.assertNotEqual(wrote.exit_code, 0)
        self.assertRegex(wrote.stderr, rb"I/O error|Read-only file system|Input/output error")
        began = reactor.seconds()
        await self.stop_pod(pod)
        self.assertLess(reactor.seconds() - began, 15.0)
        await self.remove_pod(pod)
        await self.run_container(await self.run_pod("again"), self.box(script="sleep 3600"))


_MIB = 1 << 20


class FullVolumesCase(VolumeTroubleCase):
    """A test case with the driver's socket."""

    def setUp(self) -> None:
        super().setUp()
        self.config["csi"] = {"kubelet_dir": str(self.root / "kubelet")}

    def csi_channel(self) -> Channel:
        channel = Channel(reactor, UNIXClientEndpoint(reactor, CsiConfig(str(self.root / "kubelet")).socket))
        self.addCleanup(channel.close)
        return channel

    async def write(self, container: str, name: str, mebibytes: int) -> Any:
        """Write a file to the volume, and flush it."""
        write = ("dd", "if=/dev/urandom", f"of=/data/{name}", "bs=1M", f"count={mebibytes}", "conv=fsync")
        return await self.execute(container, *write)


class DamagedAndFullVolumeTests(FullVolumesCase):
    async def test_a_damaged_volume_is_for_a_person_to_mend_and_a_full_one_goes_on_once_it_is_expanded(
        self,
    ) -> None:
        await self.start()
        sandbox, container = await self.having("first")
        await self.has_written(container)
        await self.end(sandbox)
        with self.file.open("r+b") as file:
            file.seek(1024 + 0x3FC)  # the superblock's checksum
            file.write(b"dead")
        sandbox = await self.run_pod("web", attempt=7)
        for _ in range(2):
            with self.assertRaises(GrpcError) as caught:
                await self.create(sandbox, self.mounting(self.publish("damaged"), "damaged", self.keep))
            self.assertIs(caught.exception.code, Code.FAILED_PRECONDITION)
            self.assertIn("can't be mounted", caught.exception.message)
        await self.end(sandbox)
        mended = subprocess.run(["e2fsck", "-fy", self.file], capture_output=True, text=True)
        self.assertEqual(mended.returncode, 1, mended.stdout)  # errors were corrected

        sandbox, container = await self.having("second", "exec sleep 1000")
        full = await self.write(container, "large", self.size // _MIB)
        self.assertNotEqual(full.exit_code, 0)
        self.assertIn(b"No space left on device", full.stderr)
        growing = csi.ControllerExpandVolumeRequest(volume_id="pvc-1", volume_capability=capability())
        growing.capacity_range.required_bytes = 2 * self.size
        await ControllerStub(self.csi_channel()).ControllerExpandVolume(growing, timeout=60)
        grown = csi.NodeExpandVolumeRequest(volume_id="pvc-1", volume_path=str(self.published))
        await NodeStub(self.csi_channel()).NodeExpandVolume(grown, timeout=60)
        more = await self.write(container, "more", self.size // _MIB // 2)
        self.assertEqual(more.exit_code, 0, more.stderr)
        await self.end(sandbox)
        await self.assert_kept()


class FullNodeTests(FullVolumesCase):
    """Volumes in a file system of their own, which has less room than the volume may take."""

    def make_volumes(self) -> Path:
        disk = self.root / "disk"
        with disk.open("wb") as file:
            file.truncate(3 * self.size)
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", disk], check=True)
        directory = super().make_volumes()
        subprocess.run(["mount", "-o", "loop", disk, directory], check=True)
        self.addCleanup(subprocess.check_call, ["umount", str(directory)])
        directory.chmod(0o700)
        return directory

    def fill(self) -> Path:
        """Fill the node's disk, except for 16 MiB."""
        free = shutil.disk_usage(self.volumes).free - 16 * _MIB
        filler = self.volumes / "filler"
        subprocess.run(["fallocate", "--length", str(free), filler], check=True)
        return filler

    async def test_on_a_full_disk_the_pod_gets_errors_and_all_else_goes_on(self) -> None:
        await self.start()
        sandbox, container = await self.having("first")
        other = await self.run_pod("other")
        beside = await self.run_container(other, self.box("beside", "exec sleep 1000"))
        await self.has_written(container)
        filler = self.fill()
        failed = await self.write(container, "large", self.size // _MIB // 2)
        self.assertNotEqual(failed.exit_code, 0)
        self.assertRegex(failed.stderr, rb"I/O error|Input/output error|Read-only file system")
        for each in (container, beside):
            self.assertEqual((await self.execute(each, "echo", "alive")).stdout, b"alive\n")
        request = csi.CreateVolumeRequest(name="pvc-2", volume_capabilities=[capability()])
        request.capacity_range.required_bytes = self.size
        creating = ControllerStub(self.csi_channel()).CreateVolume(request, timeout=60)
        await self.refused(Code.RESOURCE_EXHAUSTED, creating)
        await self.end(sandbox)
        filler.unlink()
        await self.assert_kept()
        self.assertEqual((await self.execute(beside, "echo", "alive")).stdout, b"alive\n")


class VolumeTroubleTests(VolumeTroubleCase):
    async def test_when_the_disk_fails_the_pod_goes_on(self) -> None:
        """All flushed data is on the disk once that is back."""
        disk = await deferToThread(VolatileFile, self.file, self.root / "volatile")
        self.addCleanup(disk.end)
        await self.start()
        sandbox, container = await self.having("first")
        await self.has_written(container)
        disk.fail()
        write = ("dd", "if=/dev/urandom", "of=/data/large", "bs=1M", "count=4", "conv=fsync")
        failed = await self.execute(container, *write)
        self.assertNotEqual(failed.exit_code, 0)
        self.assertRegex(failed.stderr, rb"I/O error|Input/output error|Read-only file system")
        await self.until_read_only(container)
        self.assertEqual((await self.execute(container, "echo", "alive")).stdout, b"alive\n")
        await self.end(sandbox)
        await deferToThread(disk.lose_power)
        await self.assert_kept()

    async def until_read_only(self, container: str) -> None:
        """Write until the file system becomes read-only, because it can't write its own metadata."""
        until = reactor.seconds() + 120.0
        said = b""
        while b"Read-only file system" not in said:
            self.assertLess(reactor.seconds(), until, said)
            wrote = await self.execute(container, "sh", "-c", "echo more >/data/more && sync")
            said = wrote.stderr
            await self.sleep(1.0)


KILLS = int(os.environ.get("INFRANETES_TEST_KILLS", "2"))
FIGURES = os.environ.get("INFRANETES_TEST_FIGURES", "")
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

    timeout = 600 + 200 * KILLS
    size = 512 << 20

    def setUp(self) -> None:
        super().setUp()
        self.acknowledged: Mapping[int, int] = {}
        self.killed: dict[str, object] = {}

    async def set_up_image(self) -> None:
        self.postgresql = await deferToThread(roots.postgresql)
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
