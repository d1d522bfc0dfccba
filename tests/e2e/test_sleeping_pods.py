# SPDX-License-Identifier: Apache-2.0
"""Pods in real VMs that sleep: with Secrets and a volume, woken by connections, commands and new daemons."""

from __future__ import annotations

import re
import socket
import time
from pathlib import Path
from typing import Any

from twisted.internet.threads import deferToThread

from infranetes.providers.qemu.program.process import pids_by_argument
from infranetes_common.wire import cri
from tests.e2e.volume_case import VolumeCase
from tests.infranetes.daemon.ctl import CtlCase

# Counts in memory, ten times a second, and serves the number; writes to its volume, and says what it does.
_SERVER = """
n=0
while :; do n=$((n+1)); echo $n >/count; sleep 0.1; done &
echo begun
while :; do nc -l -p 80 -e cat /count; done
"""


class SleepingPodTests(VolumeCase, CtlCase):
    """With the daemon as a process, QEMU and the guest image's agent."""

    async def count(self, container: str) -> int:
        while not (said := (await self.execute(container, "cat", "/count")).stdout):
            pass  # it is being written
        return int(said)

    def qemus(self) -> int:
        names = [f"guest=infranetes-{each.name}" for each in self.vms_directory().glob("[!.]*")]
        return sum(map(len, pids_by_argument(names).values()))

    def vms_directory(self) -> Path:
        return self.root / "state" / "qemu" / "vms"

    async def address(self, sandbox: str) -> str:
        request = cri.PodSandboxStatusRequest(pod_sandbox_id=sandbox)
        return str((await self.runtime.PodSandboxStatus(request, timeout=30.0)).status.network.ip)

    async def assert_shown_running(self, sandbox: str, container: str) -> None:
        (pod,) = (await self.runtime.ListPodSandbox(cri.ListPodSandboxRequest(), timeout=30.0)).items
        self.assertEqual((pod.id, pod.state), (sandbox, cri.SANDBOX_READY))
        (listed,) = (await self.runtime.ListContainers(cri.ListContainersRequest(), timeout=30.0)).containers
        self.assertEqual((listed.id, listed.state), (container, cri.CONTAINER_RUNNING))
        stats = (await self.runtime.ListPodSandboxStats(cri.ListPodSandboxStatsRequest(), timeout=30.0)).stats
        self.assertEqual([each.attributes.id for each in stats], [sandbox])
        self.assertEqual(self.qemus(), 0)

    async def test_it_goes_on_where_it_was_for_whoever_comes(self) -> None:
        await self.start()
        target = self.publish("web")
        mount = cri.Mount(container_path="/data", host_path=str(target))
        sandbox = await self.run_pod("web")
        container = await self.run_container(sandbox, self.box(script=_SERVER, mounts=[mount]))
        await self.execute(container, "sh", "-c", "echo kept >/data/file")
        address = await self.address(sandbox)
        self.assertGreater(int(await deferToThread(_served, address)), 0)

        before = await self.count(container)
        self.say(await self.ctl("sleep", "web"))
        await self.assert_shown_running(sandbox, container)
        began = time.monotonic()
        reached = int(await deferToThread(_served, address))
        self.say(f"a connection's answer after {time.monotonic() - began:.2f} s")
        self.assertGreaterEqual(reached, before)
        self.assertLess(reached, before + 600, "it did not go on while it slept, nor begin again")

        self.say(await self.ctl("sleep", "web"))
        await self.kill()
        await self.start()
        await self.assert_shown_running(sandbox, container)
        began = time.monotonic()
        said = await self.execute(container, "cat", "/data/file")
        self.say(f"a command's answer after {time.monotonic() - began:.2f} s")
        self.assertEqual(said.stdout, b"kept\n")
        clock = int((await self.execute(container, "date", "+%s")).stdout)
        self.assertLess(abs(clock - time.time()), 5.0, "its clock is right")
        self.assertGreaterEqual(await self.count(container), reached)

        self.say(await self.ctl("sleep", "web"))
        self.say(await self.ctl("wake", "web"))
        self.say(re.sub(r"(?m)^(?!.*(asleep|wakes)).*\n", "", await self.ctl("describe", "web")))
        await self.ctl("sleep", "web")
        await self.stop_pod(sandbox)
        await self.remove_pod(sandbox)
        self.assertEqual((self.qemus(), list(self.vms_directory().glob("[!.]*")), self.taps()), (0, [], ""))

    async def test_an_idle_pod_sleeps_by_itself_and_wakes(self) -> None:
        await self.start()
        sandbox = await self.run_pod("web", annotations={"infranetes.io/sleep-after": "10"})
        container = await self.run_container(sandbox, self.box(script="echo begun; exec sleep 100000"))
        for _ in range(2):
            began = time.monotonic()
            while self.qemus():
                self.assertLess(time.monotonic() - began, 300.0, "it does not fall asleep")
                await self.sleep(0.5)
            self.say(f"asleep after {time.monotonic() - began:.1f} s")
            await self.assert_shown_running(sandbox, container)
            self.assertEqual((await self.execute(container, "echo", "on")).stdout, b"on\n")
            self.assertEqual(self.qemus(), 1)

    async def test_its_probes_are_answered_while_it_sleeps(self) -> None:
        await self.start()
        asks = {"infranetes.io/sleep-after": "10", "infranetes.io/sleep-probes": "600"}
        sandbox = await self.run_pod("web", annotations=asks)
        script = "mkdir /www; echo well >/www/healthy; httpd -p 80 -h /www; echo begun; exec sleep 100000"
        container = await self.run_container(sandbox, self.box(script=script))
        address = await self.address(sandbox)
        serving = ["sh", "-c", "until wget -q -O /dev/null http://127.0.0.1/healthy; do sleep 0.2; done"]
        self.assertEqual((await self.execute(container, *serving)).exit_code, 0)
        began, asleep_since, slept = time.monotonic(), 0.0, 0
        while not asleep_since or time.monotonic() - asleep_since < 15.0:
            self.assertLess(time.monotonic() - began, 400.0, "its probes keep it awake")
            self.assertIn(b" 200 ", await deferToThread(_probed, address))
            await deferToThread(lambda: socket.create_connection((address, 80), 60.0).close())
            self.assertEqual((await self.execute(container, "cat", "/www/healthy")).stdout, b"well\n")
            await self.sleep(3.0)
            if self.qemus():
                asleep_since = 0.0
            elif not asleep_since:
                asleep_since, slept = time.monotonic(), slept + 1
        self.say(
            f"asleep, and probed for 15 s, after {time.monotonic() - began - 15.0:.1f} s and {slept} times"
        )
        await self.assert_shown_running(sandbox, container)
        self.assertIn(b"well", await deferToThread(_probed, address, "curl/8"))  # no probe: the pod itself
        self.assertEqual(self.qemus(), 1)
        await self.stop_pod(sandbox)
        await self.remove_pod(sandbox)

    def say(self, words: Any) -> None:
        """Print figures, with the machine's load."""
        print(f"{str(words).strip()} (load {Path('/proc/loadavg').read_text().split()[0]})", flush=True)


def _probed(address: str, agent: str = "kube-probe/1.36") -> bytes:
    """Return a pod's answer to a probe by HTTP."""
    request = f"GET /healthy HTTP/1.1\r\nHost: {address}\r\nUser-Agent: {agent}\r\nConnection: close\r\n\r\n"
    with socket.create_connection((address, 80), 60.0) as connection:
        connection.settimeout(60.0)
        connection.sendall(request.encode())
        return connection.makefile("rb").read()


def _served(address: str) -> bytes:
    """Return what a pod serves."""
    with socket.create_connection((address, 80), 60.0) as connection:
        connection.settimeout(60.0)
        return connection.makefile("rb").read().strip() or b"0"
