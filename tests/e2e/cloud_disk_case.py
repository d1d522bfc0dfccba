# SPDX-License-Identifier: Apache-2.0
"""A test case that boots a cloud's disk in QEMU, as on that cloud.

The network gives an address by DHCP; metadata service and time servers are simulated. The machine's clock is
an hour behind.
"""

from __future__ import annotations

import re
import secrets
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from twisted.internet.defer import Deferred
from twisted.internet.endpoints import wrapClientTLS
from twisted.trial.unittest import TestCase
from twisted.web.resource import Resource

from infranetes.guest import cloud_time
from infranetes.identity.authority import Authority
from infranetes.machines.agent.client import AgentClient
from infranetes.machines.agent.marked import marked_endpoint
from infranetes.machines.clock_reading import ClockReading, correct_clock, read_clock
from infranetes_common.concurrency import sleep, start
from infranetes_common.errors import InfranetesError
from infranetes_common.identity import Identity, encode
from infranetes_common.wire import cri
from tests.contract.pod_provider_case import reactor
from tests.e2e import cloud_disk_files
from tests.e2e.cloud_network import END_TOO, METADATA, TAP, CloudNetwork
from tests.e2e.qemu_case import QEMU
from tests.harness.durations import slow
from tests.support.waiting import until
from txgrpc import Channel

BOOT_SECONDS = 500.0  # without KVM, on a machine that is busy with other work
LARGER_GIB = 5  # the size of the machine's disk, which is larger than the one that was made
BEHIND_SECONDS = 3600  # by how much the machine's clock is behind when it boots
RIGHT_SECONDS = 0.5
TIME_SERVER = "198.51.100.123"  # announced by DHCP if the cloud has no time server of its own
KEPT_SECONDS = 500.0  # until the time service keeps the clock, after the agent's first answer
SECOND = 10**9
CONTAINER = "c" * 32
COLOURS = re.compile("\x1b\\[[0-9;]*m")
OVMF = Path("/usr/share/OVMF")
PROBE = f"""\
import socket
try:
    socket.create_connection(("{METADATA}", 80), 5)
except OSError as error:
    print(type(error).__name__)
"""


@slow(100, "it boots the disks of clouds from the firmware on")
class CloudDiskCase(TestCase):
    """Boots a cloud's disk, and asks the agent in the machine.

    :ivar serial: what the machine's serial console has shown.
    """

    timeout = 1800.0

    def setUp(self) -> None:
        self.directory = Path(self.mktemp()).absolute()
        self.directory.mkdir()
        self.serial = self.directory / "serial"
        self.authority = Authority(self.mktemp())

    # The machine

    def disk(self, source: str) -> Path:
        """Return a disk that is larger than the one that was made, as a cloud gives it to a machine.

        It has what the machine writes, and shows what was made for the rest.
        """
        target = self.directory / f"{source}.qcow2"
        base = ("-b", cloud_disk_files.made(source), "-F", "raw")
        subprocess.run(
            ["qemu-img", "create", "-q", "-f", "qcow2", *base, target, f"{LARGER_GIB}G"], check=True
        )
        self.addCleanup(target.unlink)
        return target

    def network(self, mtu: int, *, lone: bool = False, time: str = "") -> CloudNetwork:
        made = CloudNetwork(self.directory, mtu=mtu, lone=lone, time=time)
        self.addCleanup(lambda: start(made.end()))
        return made

    def boot(self, network: CloudNetwork, disk: Path, *devices: str, firmware: Sequence[str] = ()) -> None:
        """Start a machine, which ends with the test."""
        # One processor: with two that are emulated, a kernel has stood still while it booted.
        clock = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(time.time() - BEHIND_SECONDS))
        command = network.space.command(
            QEMU,
            *("-machine", "q35,smm=on,accel=tcg", "-cpu", "max,-fsrm", "-m", "1024"),
            *("-nodefaults", "-display", "none", "-serial", f"file:{self.serial}", "-rtc", f"base={clock}"),
            *("-drive", f"file={disk},format=qcow2,if=none,id=disk,cache=unsafe"),
            *("-netdev", f"tap,id=net,ifname={TAP},script=no,downscript=no"),
            *(word for device in devices for word in ("-device", device)),
            *firmware,
        )
        process = subprocess.Popen(
            [*END_TOO, *command], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )

        def end() -> None:
            process.kill()
            process.communicate()

        self.addCleanup(end)

    def secure_firmware(self) -> Sequence[str]:
        """Return UEFI firmware that starts only what Microsoft has signed, such as Debian's boot loader."""
        variables = self.directory / "variables"
        variables.write_bytes((OVMF / "OVMF_VARS_4M.ms.fd").read_bytes())
        code = OVMF / "OVMF_CODE_4M.secboot.fd"
        return (
            *("-global", "driver=cfi.pflash01,property=secure,value=on"),
            *("-drive", f"if=pflash,format=raw,readonly=on,unit=0,file={code}"),
            *("-drive", f"if=pflash,format=raw,unit=1,file={variables}"),
        )

    def identity(self, *, timed: bool) -> Identity:
        sandbox_id = secrets.token_hex(16)
        certificate, key = self.authority.issue_vm(sandbox_id, 3600)
        return Identity(
            sandbox_id=sandbox_id,
            certificate_pem=certificate,
            key_pem=key,
            ca_pem=self.authority.ca_pem,
            hostname="pod",
            now_nanos=time.time_ns() if timed else 0,
        )

    # The events

    def seen(self, words: str) -> bool:
        """Return whether the serial console has shown these words, in any colours."""
        return self.serial.exists() and words in COLOURS.sub("", self.serial.read_text(errors="replace"))

    async def until(self, holds: Callable[[], object], what: str) -> None:
        try:
            await until(holds, what, BOOT_SECONDS)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.serial.read_text(errors='replace')[-3000:]}") from None

    async def booted(self, network: CloudNetwork, identity: Identity) -> AgentClient:
        """Wait until the machine's agent answers with its identity's certificate, and return its client."""
        await self.until(network.leased, "an address")
        options = self.authority.client_options(identity.sandbox_id)
        channel = Channel(
            reactor, wrapClientTLS(options, marked_endpoint(reactor, network.address, 2475, 30.0))
        )
        self.addCleanup(lambda: channel.close())
        client = AgentClient(identity.sandbox_id, channel)
        answers: list[object] = []

        async def ask() -> None:
            try:
                answers.append(await client.info())
            except InfranetesError:
                return

        def answered() -> bool:
            if not asking[0].called:
                return False
            asking[0] = start(ask())
            return bool(answers)

        asking: list[Deferred[None]] = [start(ask())]
        await self.until(answered, "the agent's answer")
        await asking[0]
        return client

    async def ran(self, client: AgentClient, *command: str) -> str:
        """Run a command in the machine, and return its output."""
        return (await client.exec_sync(CONTAINER, command, 60, 70.0, 1 << 16)).stdout.decode().strip()

    async def read(self, client: AgentClient) -> ClockReading:
        _, reading = await read_clock(client.info, time.time_ns)
        return reading

    async def check_clock(self, client: AgentClient, identity: Identity) -> None:
        first = await self.read(client)
        self.assertGreater(first.machine, identity.now_nanos, "it has the time of its launch at least")
        await correct_clock(identity.sandbox_id, client, first)
        await self.until_right(client)

    async def until_kept(self, client: AgentClient) -> None:
        """Wait until the machine's time service keeps its clock, so that the node leaves it alone."""
        deadline = time.monotonic() + KEPT_SECONDS
        while True:
            reading = await self.read(client)
            if reading.steady == 0 and abs(reading.ahead) < RIGHT_SECONDS * SECOND:
                return
            if time.monotonic() > deadline:
                said = await self.ran(
                    client, "journalctl", "--no-pager", "--unit=chrony", f"--unit={cloud_time.UNIT}"
                )
                self.fail(f"no time service keeps the clock: {reading}\n{said}")
            await sleep(reactor, 1)

    async def check_its_end_is_made_good(self, client: AgentClient) -> None:
        """Kill the time service, and check that it starts again, with the services beside it."""

        async def show(unit: str) -> list[str]:
            properties = "--property=ActiveState,MainPID"
            return (await self.ran(client, "systemctl", "show", "--value", properties, unit)).split()

        before = [await show(unit) for unit in ("chrony.service", cloud_time.UNIT)]
        await self.ran(client, "systemctl", "kill", "--signal=KILL", "chrony.service")
        deadline = time.monotonic() + KEPT_SECONDS
        while True:
            now = [await show(unit) for unit in ("chrony.service", cloud_time.UNIT)]
            if all("active" in each for each in now) and now[0] != before[0]:
                return
            self.assertLess(time.monotonic(), deadline, now)

    async def check_nothing_waits_for_the_time(self, client: AgentClient) -> None:
        before = await self.ran(
            client, "systemctl", "list-dependencies", "--after", "--plain", "vmserver.service"
        )
        self.assertIn("basic.target", before)
        for word in ("chrony", "time-sync", cloud_time.UNIT):
            self.assertNotIn(word, before)

    async def until_right(self, client: AgentClient) -> None:
        for _ in range(60):
            reading = await self.read(client)
            if abs(reading.ahead) < RIGHT_SECONDS * SECOND:
                return
            await correct_clock("", client, reading)
        self.fail(f"the clock stays wrong: {reading}")

    async def check_machine(self, client: AgentClient, mtu: int) -> None:
        """Check a machine that is itself a pod."""
        await client.create(CONTAINER, "sha256:" + "0" * 64, cri.ContainerConfig(), cri.PodSandboxConfig())
        await client.start(CONTAINER)
        self.assertEqual(await self.ran(client, "cat", "/sys/class/net/eth0/mtu"), str(mtu))
        size = int((await self.ran(client, "df", "--block-size=1", "--output=size", "/")).split()[-1])
        self.assertGreater(size, (LARGER_GIB - 0.4) * (1 << 30), "the root has grown")
        self.assertEqual(await self.ran(client, "python3", "-c", PROBE), "ConnectionRefusedError")
        self.assertEqual(await self.ran(client, "systemctl", "--failed", "--quiet", "--plain"), "")
        self.assertEqual(await self.ran(client, "hostname"), "pod")

    async def boot_pod(
        self,
        network: CloudNetwork,
        disk: Path,
        devices: Sequence[str],
        metadata: Callable[[bytes], Resource],
        firmware: Sequence[str] = (),
        *,
        timed: bool = True,
    ) -> tuple[AgentClient, Identity]:
        """Boot a machine that is itself a pod. :param timed: whether its identity has the time."""
        identity = self.identity(timed=timed)
        network.serve_metadata(metadata(encode(identity)))
        self.boot(network, disk, *devices, firmware=firmware)
        return await self.booted(network, identity), identity
