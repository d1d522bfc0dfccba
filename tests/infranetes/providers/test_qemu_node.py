# SPDX-License-Identifier: Apache-2.0
"""The QEMU provider's effects on the node: processes, bridge, taps, nftables, and the test of KVM."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
from ipaddress import IPv4Network, IPv6Network
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred, succeed
from twisted.internet.task import deferLater
from twisted.logger import capturedLogs, formatEvent
from twisted.trial.unittest import SynchronousTestCase, TestCase

from infranetes.providers.interface import ProviderContext
from infranetes.providers.qemu import accelerator, bridge, kvm, process
from infranetes.providers.qemu.bridge import MAC, Bridge, BridgePort, open_tap, port_group
from infranetes.providers.qemu.kvm import look_at_kvm
from infranetes.providers.qemu.parts import make_parts
from infranetes.providers.qemu.paths import ProviderPaths
from infranetes.providers.qemu.privileges import QemuUser
from infranetes.providers.qemu.process import WatchedProcess, pids_by_argument
from infranetes.providers.qemu.settings import QemuSettings
from infranetes.providers.qemu.shares import table_of
from infranetes_common import commands
from infranetes_common.errors import FailedPrecondition, InfranetesError, InvalidArgument, Unavailable
from infranetes_common.reactors import installed
from tests.harness.needs import needs_netns, needs_root
from tests.support.waiting import until

reactor = installed()
BRIDGE = "inftest1"
SUBNET = IPv4Network("10.217.0.0/24")
QEMU = "/usr/bin/qemu-system-x86_64"
ME = QemuUser(os.getuid(), os.getgid())


def said(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


class WatchedProcessTests(TestCase):
    """Processes that outlive the daemon."""

    async def start(self, marker: str) -> int:
        with open(os.devnull) as null:
            pid = process.spawn(reactor, ["sleep", marker], {0: null.fileno(), 1: null.fileno()}).pid
        while marker not in pids_by_argument([marker]):
            await deferLater(reactor, 0.01, lambda: None)
        return pid

    async def test_its_end_is_told_once_and_kill_waits_for_it(self) -> None:
        ended: list[None] = []
        pid = await self.start("62.5")
        self.assertEqual(pids_by_argument(["62.5", "other"]), {"62.5": [pid]})
        watched = WatchedProcess(reactor, pid, lambda: ended.append(None))
        self.assertTrue(watched.alive)
        await watched.kill()
        await watched.kill()
        self.assertEqual((watched.alive, watched.gone), (False, True))
        self.assertEqual((ended, pids_by_argument(["62.5"])), ([None], {}))

    async def test_one_that_ends_by_itself_is_told(self) -> None:
        done: Deferred[None] = Deferred()
        pid = await self.start("63.5")
        WatchedProcess(reactor, pid, lambda: done.callback(None))
        os.kill(pid, signal.SIGTERM)
        await done.addTimeout(10.0, reactor)

    async def test_how_it_ended_is_known_of_those_started_here(self) -> None:
        for script, words in (
            ("exit 3", "ended with exit code 3"),
            ("kill -TERM $$", "was killed by SIGTERM"),
            ("kill -KILL $$", "was killed by SIGKILL (by a person, or by the kernel for want of memory"),
        ):
            with open(os.devnull) as null:
                child = process.spawn(reactor, ["sh", "-c", f"read x; {script}"], {0: "w", 1: null.fileno()})  # type: ignore[dict-item]
            done: Deferred[None] = Deferred()
            watched = WatchedProcess(reactor, child.pid, lambda: done.callback(None), child)  # noqa: B023
            child.transport.closeStdin()  # type: ignore[union-attr]
            await done.addTimeout(10.0, reactor)
            self.assertIn(words, watched.end)
        pid = await self.start("69.5")
        stranger = WatchedProcess(reactor, pid, lambda: None)
        await stranger.kill()
        self.assertIn("not known", stranger.end)

    async def test_an_event_that_is_not_its_end_is_no_end(self) -> None:
        pid = await self.start("66.25")
        watched = WatchedProcess(reactor, pid, lambda: self.fail("told"))
        watched.doRead()
        self.assertTrue(watched.alive)
        watched.unwatch()
        await WatchedProcess(reactor, pid, lambda: None).kill()

    async def test_one_that_is_forgotten_goes_on(self) -> None:
        pid = await self.start("64.5")
        watched = WatchedProcess(reactor, pid, lambda: self.fail("told"))
        watched.unwatch()
        watched.unwatch()
        self.assertEqual((watched.alive, watched.gone), (False, False))
        self.assertEqual(pids_by_argument(["64.5"]), {"64.5": [pid]})
        await WatchedProcess(reactor, pid, lambda: None).kill()

    async def test_one_that_is_gone_is_no_process(self) -> None:
        pid = await self.start("65.5")
        await WatchedProcess(reactor, pid, lambda: None).kill()
        await until(lambda: not os.path.exists(f"/proc/{pid}"), "it is reaped")
        self.assertRaises(ProcessLookupError, WatchedProcess, reactor, pid, lambda: None)


@needs_netns
class BridgeTests(TestCase):
    """The bridge and its table, on this machine's kernel."""

    def setUp(self) -> None:
        self.network = Bridge(reactor, BRIDGE, 1400)

    def tearDown(self) -> Any:
        return Deferred.fromCoroutine(self.network.remove())

    def addresses(self, name: str = BRIDGE) -> list[str]:
        [found] = json.loads(said("ip", "-j", "address", "show", "dev", name))
        return [f"{each['local']}/{each['prefixlen']}" for each in found["addr_info"]]

    def link(self, name: str) -> Any:
        [found] = json.loads(said("ip", "-d", "-j", "link", "show", "dev", name))
        return found

    def table(self, family: str) -> str:
        return said("nft", "list", "table", family, f"infranetes_{BRIDGE}")

    async def test_it_is_there_afterwards_however_often_it_is_set_up(self) -> None:
        for _ in range(2):
            await self.network.set_up(SUBNET, [])
            self.assertEqual(self.addresses(), ["10.217.0.1/24"])
            self.assertEqual(self.link(BRIDGE)["mtu"], 1400)
            self.assertIn("ip saddr 10.217.0.0/24 ip daddr != 10.217.0.0/24 masquerade", self.table("ip"))
        self.assertEqual(Path("/proc/sys/net/ipv4/ip_forward").read_text().strip(), "1")
        await self.network.remove()
        await self.network.remove()
        self.assertNotIn(BRIDGE, said("nft", "list", "tables"))
        self.assertNotIn(BRIDGE, said("ip", "link"))

    async def test_it_is_as_the_configuration_says(self) -> None:
        """The share of connections, and the networks that see the pods' own addresses."""
        context = ProviderContext(
            Path("/x"),
            Path("/run/x"),
            "c",
            "n",
            cluster_networks=(IPv6Network("fd00::/64"), IPv4Network("10.96.0.0/12")),
        )
        settings = QemuSettings(bridge=BRIDGE, mtu=1400, connections=300)
        parts = make_parts(reactor, settings, context, ProviderPaths(Path("/x"), Path("/run/x")))
        await parts.pod_network.bridge.set_up(SUBNET, [])
        self.assertEqual(self.link(BRIDGE)["mtu"], 1400)
        self.assertIn("ip saddr 10.217.0.0/24 ip daddr 10.96.0.0/12 return", self.table("ip"))
        shares = said("nft", "list", "table", "ip", table_of(BRIDGE))
        self.assertIn("ct count over 300 ", shares)

    async def test_a_node_whose_kernel_has_no_ipv6(self) -> None:
        proc = Path(self.mktemp())
        (proc / "net/ipv4").mkdir(parents=True)
        (proc / "net/ipv4/ip_forward").write_text("0\n")
        (proc / "net/ipv4/conf").symlink_to("/proc/sys/net/ipv4/conf")
        network = Bridge(reactor, BRIDGE, 1400, proc)
        await network.set_up(SUBNET, [])
        self.assertEqual((proc / "net/ipv4/ip_forward").read_text(), "1")
        tap = open_tap("inftesttap")
        self.addCleanup(os.close, tap)
        await network.join(BridgePort("inftesttap", "10.217.0.7"))
        self.assertIn("inftesttap", said("ip", "link", "show", "master", BRIDGE))

    async def test_another_subnet_replaces_the_one_before(self) -> None:
        await self.network.set_up(SUBNET, [])
        await self.network.set_up(IPv4Network("10.218.0.0/24"), [])
        self.assertEqual(self.addresses(), ["10.218.0.1/24"])
        self.assertNotIn("10.217", self.table("ip"))

    async def test_what_a_killed_daemon_left_half_set_up_is_completed(self) -> None:
        await self.network.set_up(SUBNET, [])
        said("ip", "address", "flush", "dev", BRIDGE)
        said("ip", "link", "set", "dev", BRIDGE, "down")
        said("nft", "delete", "table", "ip", f"infranetes_{BRIDGE}")
        await self.network.set_up(SUBNET, [])
        self.assertEqual(self.addresses(), ["10.217.0.1/24"])
        self.assertIn("masquerade", self.table("ip"))

    async def test_a_name_that_is_taken_is_refused_and_left_alone(self) -> None:
        said("ip", "link", "add", "name", BRIDGE, "type", "bridge")
        error: Any = await self.assertFailure(
            Deferred.fromCoroutine(self.network.set_up(SUBNET, [])), FailedPrecondition
        )
        self.assertIn("providers.qemu.bridge", str(error))
        self.assertEqual(self.addresses(), [])

    async def test_a_subnet_that_the_node_has_elsewhere_is_refused(self) -> None:
        error: Any = await self.assertFailure(
            Deferred.fromCoroutine(self.network.set_up(IPv4Network("127.0.0.0/8"), [])), InvalidArgument
        )
        self.assertIn("lo", str(error))

    async def test_an_overlays_device_may_have_the_subnets_first_address(self) -> None:
        said("ip", "link", "add", "name", "inftest2", "type", "bridge")
        self.addCleanup(said, "ip", "link", "delete", "inftest2")
        said("ip", "address", "add", "10.217.0.0/32", "dev", "inftest2")
        await self.network.set_up(SUBNET, [])
        said("ip", "address", "add", "10.217.0.4/32", "dev", "inftest2")
        await self.assertFailure(Deferred.fromCoroutine(self.network.set_up(SUBNET, [])), InvalidArgument)

    async def test_a_vm_may_send_as_itself_alone(self) -> None:
        await self.network.set_up(SUBNET, [BridgePort("infaaaa", "10.217.0.5")])
        port = BridgePort("infbbbb", "10.217.0.6")
        for _ in range(2):
            await self.network.allow(port)
        self.assertIn('"infbbbb" . 0a:58:0a:d9:00:06 . 10.217.0.6', self.table("bridge"))
        for _ in range(2):
            await self.network.forbid(port)
        self.assertNotIn("infbbbb", self.table("bridge"))
        self.assertIn('"infaaaa" . 0a:58:0a:d9:00:05 . 10.217.0.5', self.table("bridge"))

    async def test_an_agents_own_port_is_kept_as_the_one_of_all_is(self) -> None:
        await self.network.set_up(SUBNET, [])
        port = BridgePort("infbbbb", "10.217.0.6", 4242)
        for verb, there in ((self.network.allow, True), (self.network.forbid, False)):
            await verb(port)
            for family in ("ip", "bridge"):
                self.assertEqual("10.217.0.6 . 4242" in self.table(family), there, family)

    async def test_a_tap_joins_and_goes_with_its_descriptor(self) -> None:
        await self.network.set_up(SUBNET, [])
        tap = open_tap("inftesttap")
        try:
            await self.network.join(BridgePort("inftesttap", "10.217.0.7"))
            self.assertRaises(OSError, open_tap, "inftesttap")
            self.assertEqual(self.link("inftesttap")["master"], BRIDGE)
        finally:
            os.close(tap)
        self.assertNotIn("inftesttap", said("ip", "link"))

    async def test_what_the_kernel_does_with_a_vms_port(self) -> None:
        await self.network.set_up(SUBNET, [])
        tap = open_tap("inftesttap")
        self.addCleanup(os.close, tap)
        port = BridgePort("inftesttap", "10.217.0.7")
        for _ in range(2):
            await self.network.join(port)
            found = self.link("inftesttap")
            kept = found["linkinfo"]["info_slave_data"]
            self.assertEqual((found["mtu"], "UP" in found["flags"]), (1400, True))
            self.assertEqual(int(found["group"]), port_group(BRIDGE), "by which the table knows the ports")
            self.assertEqual((kept["learning"], kept["flood"]), (False, False))
            self.assertEqual(int(kept["group_fwd_mask"], 16), 0xFFFD)
            entries = json.loads(said("bridge", "-j", "fdb", "show", "dev", "inftesttap"))
            self.assertEqual([each["mac"] for each in entries if each["state"] == "static"], [port.mac])
            self.assertEqual(self.addresses("inftesttap"), [])

    async def test_a_port_whose_vm_ends_just_then_hinders_no_other(self) -> None:
        await self.network.set_up(SUBNET, [])
        ports = [BridgePort(f"inf0123456789a{at}", f"10.217.0.{at}") for at in (7, 8)]
        for port in ports:
            self.addCleanup(os.close, open_tap(port.tap))
            await self.network.join(port)
        join = self.network.join
        joined: list[BridgePort] = []

        async def fail_first(port: BridgePort) -> None:
            if port is ports[0]:
                raise Unavailable("its tap is gone")
            await join(port)
            joined.append(port)

        self.patch(self.network, "join", fail_first)
        with capturedLogs() as events:
            await self.network.set_up(SUBNET, ports)
        self.assertEqual(joined, ports[1:])
        self.assertIn("its tap is gone", " ".join(map(formatEvent, events)))

    async def test_a_kernel_that_knows_no_times_for_half_open_connections_is_told_and_will_do(self) -> None:
        run = self.network._nft

        async def without(script: str) -> None:
            if "ct timeout" in script:
                raise InfranetesError("No such file or directory")
            await run(script)

        self.patch(self.network, "_nft", without)
        with capturedLogs() as events:
            await self.network.set_up(SUBNET, [])
        self.assertIn("half-open connections of pods stay", " ".join(map(formatEvent, events)))
        self.assertIn("masquerade", self.table("ip"))
        self.table("bridge")

    async def test_what_a_pod_has_begun_is_forgotten_with_it(self) -> None:
        await self.network.set_up(SUBNET, [])
        ran: list[tuple[list[str], bytes]] = []
        check = commands.check

        async def noting(reactor: Any, command: list[str], seconds: float, given: bytes = b"") -> bytes:
            ran.append((command, given))
            return await check(reactor, command, seconds, given)

        self.patch(bridge, "check", noting)
        await self.network.forbid(BridgePort("infaaaa", "10.217.0.5"))
        self.assertIn(["conntrack", "-D", "-s", "10.217.0.5"], [command for command, _ in ran])
        forgotten = b"".join(given for _, given in ran)
        for each in (b"begun { 10.217.0.5 . 0, ", b"refused-connections { 10.217.0.5 }"):
            self.assertIn(each, forgotten)

    async def test_somebody_elses_port_is_left_alone(self) -> None:
        await self.network.set_up(SUBNET, [])
        self.addCleanup(os.close, open_tap("inftestother"))
        said("ip", "link", "set", "dev", "inftestother", "master", BRIDGE)
        await self.network.set_up(SUBNET, [])
        self.assertEqual(self.link("inftestother")["group"], "default")

    async def test_what_the_kernel_does_with_the_bridge(self) -> None:
        for mtu in (1400, 1300, 1500):
            await Bridge(reactor, BRIDGE, mtu).set_up(SUBNET, [])
            found = self.link(BRIDGE)
            self.assertEqual((found["mtu"], found["address"], "UP" in found["flags"]), (mtu, MAC, True))
            self.assertEqual(found["linkinfo"]["info_data"]["mcast_snooping"], 0)
            self.assertEqual(self.addresses(), ["10.217.0.1/24"])
            self.assertEqual(Path(f"/proc/sys/net/ipv6/conf/{BRIDGE}/disable_ipv6").read_text(), "1\n")

    async def test_the_ports_that_are_there_follow_the_bridges_mtu(self) -> None:
        await self.network.set_up(SUBNET, [])
        name = "inf0123456789ab"
        tap = open_tap(name)
        self.addCleanup(os.close, tap)
        port = BridgePort(name, "10.217.0.7")
        await self.network.join(port)
        await Bridge(reactor, BRIDGE, 1300).set_up(SUBNET, [port])
        self.assertEqual((self.link(name)["mtu"], self.link(BRIDGE)["mtu"]), (1300, 1300))

    async def test_the_mtu_is_by_default_that_of_the_first_default_route(self) -> None:
        lo, first, second = (
            {"ifname": name, "address": "", "mtu": mtu}
            for name, mtu in (("lo", 65536), ("a", 9001), ("b", 1480))
        )
        for routes, mtu in ((["b", "a"], 1480), (["a"], 9001), ([], 1500), (["gone", "a"], 1500)):
            answer = json.dumps([{"dst": "default", "dev": name} for name in routes])
            self.patch(bridge, "check", lambda *_, answer=answer: succeed(answer))
            found = await Bridge(reactor, BRIDGE, 0)._uplink_mtu([lo, first, second])  # type: ignore[list-item]
            self.assertEqual(found, mtu, routes)


@needs_root
class AcceleratorTests(TestCase):
    """KVM has to prove that it works."""

    def script(self, body: str) -> str:
        path = Path(self.mktemp()).absolute()
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return str(path)

    async def test_the_guest_proves_what_works(self) -> None:
        """Emulation always works, so there the guest's proof must succeed."""
        self.assertEqual(await accelerator.probe(reactor, QEMU, "tcg", ME, 60.0), "")

    async def test_a_guest_that_hangs_proves_nothing_and_is_killed(self) -> None:
        hanging = self.script("exec sleep 66.5")
        fault = await accelerator.probe(reactor, hanging, "kvm", ME, 0.5)
        self.assertIn("hung for 0.5 s", fault)
        await until(lambda: not pids_by_argument(["66.5"]), "it is killed")

    async def test_a_qemu_that_refuses_is_quoted(self) -> None:
        fault = await accelerator.probe(
            reactor, self.script("echo Could not access KVM kernel module >&2; exit 1"), "kvm", ME, 10.0
        )
        self.assertIn("Could not access KVM", fault)
        self.assertTrue(await accelerator.probe(reactor, self.script("exit 0"), "kvm", ME, 10.0))

    async def test_the_kernel_of_the_image_has_to_boot_too(self) -> None:
        """KVM in a virtual machine may run 512 bytes of code, but not a kernel."""
        kernel = self.kernel()
        says = self.script(f"echo 'VFS: {accelerator.KERNEL_SAYS.decode()} on unknown-block(0,0)'")
        self.assertEqual(await accelerator.probe_kernel(reactor, says, "kvm", ME, kernel, 10.0), "")
        broken = self.script("echo KVM internal error. Suberror: 1 >&2")
        fault = await accelerator.probe_kernel(reactor, broken, "kvm", ME, kernel, 10.0)
        self.assertIn("did not boot: KVM internal error", fault)
        hanging = self.script("exec sleep 66.25")
        fault = await accelerator.probe_kernel(reactor, hanging, "kvm", ME, kernel, 0.5)
        self.assertIn("kernel hung for 0.5 s", fault)
        await until(lambda: not pids_by_argument(["66.25"]), "it is killed")

    async def test_where_it_does_not_it_is_emulation(self) -> None:
        self.patch(kvm, "KVM", str(self.kernel()))
        qemu = self.script(
            f'case "$*" in *-kernel*) echo no luck; exit 1;; esac; exit {accelerator._EXIT_CODE}'
        )
        memory = Path(self.mktemp())
        chosen, reason = await accelerator.choose(reactor, "auto", qemu, "1", ME, self.kernel(), memory)
        self.assertEqual(chosen, "tcg")
        self.assertIn("no luck", reason)

    def kernel(self) -> Path:
        path = Path(self.mktemp()).absolute()
        path.write_bytes(b"kernel")
        return path

    async def test_the_answer_is_remembered_for_this_boot_and_this_qemu(self) -> None:
        device = Path(self.mktemp())
        device.touch()
        self.patch(kvm, "KVM", str(device))
        count = Path(self.mktemp()).absolute()
        says = accelerator.KERNEL_SAYS.decode()
        working = self.script(f"echo x >>{count}; echo {says}; exit {accelerator._EXIT_CODE}")
        kernel = self.kernel()
        memory = Path(self.mktemp())
        for version, asked in (("1", 2), ("1", 2), ("2", 4)):
            chosen = await accelerator.choose(reactor, "auto", working, version, ME, kernel, memory)
            self.assertEqual(chosen[0], "kvm")
            self.assertEqual(count.read_text().count("x"), asked)

    async def test_a_device_that_qemu_may_not_open_is_said_how_to_open(self) -> None:
        device = Path(self.mktemp()).absolute()
        device.touch()
        self.patch(kvm, "KVM", str(device))
        os.chown(device, 0, 0)
        kernel, memory = self.kernel(), Path(self.mktemp())
        for mode, user, opens in (
            (0o600, QemuUser(65534, 65534), False),
            (0o660, QemuUser(65534, 65534, [0]), True),
            (0o660, QemuUser(65534, 65534), False),
            (0o640, QemuUser(65534, 0), False),
            (0o666, QemuUser(65534, 65534), True),
        ):
            device.chmod(mode)
            self.assertEqual(kvm.closed_to(user) == "", opens, (oct(mode), user))
        device.chmod(0o600)
        nobody = QemuUser(65534, 65534)
        chosen, reason = await accelerator.choose(reactor, "auto", QEMU, "7.2", nobody, kernel, memory)
        self.assertEqual(chosen, "tcg")
        for words in (f"{device} belongs to root:root with mode 0600", f"chmod 0660 {device}"):
            self.assertIn(words, reason)

    def test_a_check_of_the_configuration_runs_no_guest_and_says_so_where_it_was_asked_to_look(self) -> None:
        device = Path(self.mktemp()).absolute()
        device.touch()
        device.chmod(0o666)
        self.patch(kvm, "KVM", str(device))
        for setting in ("auto", "kvm"):
            self.assertEqual(list(look_at_kvm(setting, "nobody", False)), [])
            [unseen] = look_at_kvm(setting, "nobody", True)
            self.assertIn("no guest was run", str(unseen))
        self.assertEqual(list(look_at_kvm("tcg", "nobody", True)), [])

    async def test_without_the_device_it_is_emulation(self) -> None:
        self.patch(kvm, "KVM", "/nonexistent")
        kernel, memory = self.kernel(), Path(self.mktemp())
        chosen, reason = await accelerator.choose(reactor, "auto", QEMU, "7.2", ME, kernel, memory)
        self.assertEqual(chosen, "tcg")
        self.assertIn("/nonexistent", reason)
        error = await self.assertFailure(
            Deferred.fromCoroutine(accelerator.choose(reactor, "kvm", QEMU, "7.2", ME, kernel, memory)),
            FailedPrecondition,
        )
        self.assertIn("accelerator", str(error))


@needs_root
class DependencyTests(SynchronousTestCase):
    """Tests here need root and Debian's tools, and fail without them."""

    def test_this_runs_as_root_with_the_tools(self) -> None:
        self.assertEqual(os.geteuid(), 0, "bridges and taps are made by root")
        for program in ("ip", "nft", "setpriv", "setsid", QEMU, "qemu-img"):
            commands.find_program(program)
