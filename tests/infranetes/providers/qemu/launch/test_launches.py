# SPDX-License-Identifier: Apache-2.0
"""The QEMU provider's contract and launches, with a program in QEMU's place."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any, NoReturn

import attrs
from twisted.internet.defer import Deferred
from twisted.logger import capturedLogs, formatEvent
from twisted.trial.unittest import TestCase

from infranetes.images.preload import Preload
from infranetes.providers.interface import Instance, Progress, Size
from infranetes.providers.qemu.cgroups.placement import Placement
from infranetes.providers.qemu.host import uids
from infranetes.providers.qemu.launch import clone
from infranetes.providers.qemu.network import bridge, firewalls
from infranetes.providers.qemu.program.agent_port import AgentPortEndpoint
from infranetes.providers.qemu.program.command_line import Fd
from infranetes.providers.qemu.program.open_files import OpenFiles
from infranetes.providers.qemu.program.process import WatchedProcess
from infranetes.providers.qemu.program.sockets import AGENT
from infranetes.providers.qemu.provider import QemuProvider
from infranetes.providers.qemu.settings import QemuSettings
from infranetes.providers.qemu.template import boot
from infranetes.providers.qemu.template.template import IMAGES, PARTS, RAM
from infranetes.providers.qemu.vm import record, vm
from infranetes_common.concurrency import start
from infranetes_common.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InfranetesError,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from infranetes_common.identity import AGENT_PORT
from infranetes_common.pod_firewall import CLOSED, decode
from tests.contract.leased_addresses import LeasedAddressContract
from tests.contract.pod_provider import LaunchContract
from tests.contract.pod_provider_case import reactor
from tests.e2e.qemu_launches import QemuLaunches
from tests.harness.durations import slow
from tests.harness.needs import needs_netns, needs_programs
from tests.infranetes.providers.qemu.stand_in_case import StandInCase, make_image
from tests.infranetes.providers.qemu.stand_in_qemu import BY_PORT, PORT


@needs_netns
@needs_programs("qemu-img")
class QemuContractTests(StandInCase, LaunchContract, LeasedAddressContract, TestCase):
    """The contract of every provider, for VMs without an agent."""

    @slow(10, "it starts and kills daemons")
    async def test_a_daemon_killed_in_a_launch_leaves_what_the_next_one_adopts_or_ends(self) -> None:
        await super().test_a_daemon_killed_in_a_launch_leaves_what_the_next_one_adopts_or_ends()


@needs_netns
@needs_programs("qemu-img")
class QemuLaunchTests(StandInCase, QemuLaunches, TestCase):
    """What only this provider does."""

    async def test_few_pods_start_at_once_where_it_emulates(self) -> None:
        self.settings["starts_at_once"] = 3
        provider = self.make_provider()
        assert isinstance(provider, QemuProvider)
        self.assertEqual(provider.starts_at_once(), 0)
        await self.within(provider.start(lambda words: None), self.start_timeout)
        self.assertEqual(provider.starts_at_once(), 3)
        line = provider._current.line
        assert line is not None
        provider._current.line = attrs.evolve(line, accelerator="kvm")
        self.assertEqual(provider.starts_at_once(), 0)

    async def test_each_vm_has_a_user_of_its_own_and_no_right(self) -> None:
        provider = await self.started()
        users = set()
        for _ in range(2):
            [pid] = self.pids(await self.running(provider, self.spec()))
            status = Path(f"/proc/{pid}/status").read_text()
            fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
            [user] = set(fields["Uid"].split() + fields["Gid"].split())
            users.add(int(user))
            self.assertEqual((fields["Groups"].strip(), fields["NoNewPrivs"]), ("", "1"))
            self.assertEqual({fields[each].strip("0") for each in ("CapEff", "CapPrm", "CapBnd")}, {""})
        allowed = uids.parse(QemuSettings().uids)
        self.assertEqual([user in allowed for user in users], [True, True])

    async def test_taps_are_made_in_threads(self) -> None:
        """The kernel makes one only when no network on the whole node is being changed or removed."""
        threads: list[int] = []

        def open_tap(name: str) -> int:
            threads.append(threading.get_ident())
            return bridge.open_tap(name)

        self.patch(clone, "open_tap", open_tap)
        self.patch(boot, "open_tap", open_tap)
        self.settings["template_dir"] = str(self.place / "templates-of-this-test")
        await self.running(await self.started(), self.spec())
        self.assertEqual(len(threads), 2)
        self.assertNotIn(threading.get_ident(), threads)

    async def test_and_end_in_threads_where_no_qemu_starts(self) -> None:
        threads: list[int] = []
        close = OpenFiles.close

        def closed(files: OpenFiles) -> None:
            if Fd.TAP in files.by_number():
                threads.append(threading.get_ident())
            close(files)

        def spawn(*args: object) -> NoReturn:
            raise OSError(errno.EAGAIN, "no process")

        provider = await self.started()
        self.patch(clone, "spawn", spawn)
        self.patch(OpenFiles, "close", closed)
        with self.assertRaises(InfranetesError):
            await self.running(provider, self.spec())
        self.assertEqual(len(threads), 1)
        self.assertNotIn(threading.get_ident(), threads)

    async def test_a_size_beyond_the_templates_is_plugged_in(self) -> None:
        provider = await self.started()
        size = Size(cpu_millis=1500, memory_bytes=1 << 30)
        instance = await self.running(provider, self.spec(size=size))
        console = (self.vms() / instance.token / record.CONSOLE).read_text().splitlines()
        plugged = [json.loads(line)["device_add"] for line in console if "device_add" in line]
        self.assertEqual([each for each in plugged if each.startswith("cpu")], ["cpu1"])
        self.assertTrue([each for each in plugged if each.startswith("dimm")], plugged)

    async def test_a_disk_larger_than_the_templates_is_made_so(self) -> None:
        provider = await self.started()
        for asked, sizes in (({}, []), ({"infranetes.io/disk": "30Gi"}, [30 << 30])):
            with capturedLogs() as events:
                instance = await self.running(provider, self.spec(annotations=asked))
            [told] = [words for each in events if " runs at " in (words := formatEvent(each) or "")]
            steps = r"files \d\.\d+, process .*, state .*, execute .*, identity .*, size \d+"
            self.assertRegex(told, steps, "the log tells how long each step took")
            console = (self.vms() / instance.token / record.CONSOLE).read_text().splitlines()
            self.assertEqual(
                [json.loads(each)["block_resize"] for each in console if "resize" in each], sizes
            )

    async def test_a_vm_is_put_into_its_pods_group_and_pinned_by_its_process(self) -> None:
        provider: Any = await self.started()
        placed: list[tuple[str, str, int]] = []
        pinned: list[tuple[str, int, str, str]] = []

        async def place(its: record.VmRecord, pid: int) -> None:
            placed.append((its.id, its.cgroup_parent, pid))

        async def pin(its: record.VmRecord, pid: int, cpus: str, mems: str) -> None:
            pinned.append((its.id, pid, cpus, mems))

        self.patch(provider._parts.placement, "place", place)
        self.patch(provider._parts.placement, "pin", pin)
        instance = await self.running(provider, self.spec(cgroup_parent="/kubepods/pod1"))
        [pid] = self.pids(instance)
        self.assertEqual(placed, [(instance.id, "/kubepods/pod1", pid)])
        await provider.pin(instance.id, "2-3", "0")
        self.assertEqual(pinned, [(instance.id, pid, "2-3", "0")])
        later = await self.running(provider, self.spec())
        [pid] = self.pids(later)
        for _ in range(2):
            await provider.place(later.id, "/kubepods/pod2", Size())
        self.assertEqual(placed[2:], 2 * [(later.id, "/kubepods/pod2", pid)])
        await self.refused(FailedPrecondition, provider.place(later.id, "/kubepods/pod3", Size()))
        self.assertEqual(len(placed), 4)
        await provider.place(later.id, "", Size())
        self.assertEqual(len(placed), 4, "there is none to put it into")
        await self.within(provider.stop())
        self.patch(Placement, "place", lambda groups, its, pid: place(its, pid))
        await self.started()
        self.assertIn((later.id, "/kubepods/pod2", pid), placed[4:], "the next daemon puts it there, too")

    async def test_of_one_that_failed_and_does_not_end_both_is_told(self) -> None:
        self.settings["boot_timeout"] = 0.3
        self.silence_agents()
        self.patch(vm, "_KILL_SECONDS", 0.1)
        provider = await self.started()
        hanging = self.patch(WatchedProcess, "kill", lambda process: Deferred())
        launched = await self.within(provider.launch(self.spec()))
        error = await self.refused(Unavailable, provider.wait_running(launched.id, self.boot_timeout))
        [pid] = self.pids(launched)
        for words in ("its agent's start took longer than 0.3 s", f"QEMU's process {pid}", "does not end"):
            self.assertIn(words, str(error))
        await self.refused(Unavailable, provider.destroy(launched.id))
        self.assertEqual([each.id for each in await provider.list()], [launched.id])
        hanging.restore()

    async def test_a_firewall_is_that_of_the_vm_that_is_named(self) -> None:
        closed = await self.started()
        instance = await self.running(closed, self.spec())
        assert isinstance(closed, QemuProvider)
        error = await self.refused(FailedPrecondition, closed.set_firewall(instance.id, CLOSED))
        self.assertIn("NetworkPolicies are turned off", str(error))
        await self.within(closed.stop())
        context = attrs.evolve(self.context(), network_policies=True)
        self.patch(self, "context", lambda *_: context)
        provider = await self.started()
        assert isinstance(provider, QemuProvider)
        await provider.set_firewall(instance.id, CLOSED)
        self.assertEqual(decode((self.vms() / instance.token / "firewall.json").read_bytes()), CLOSED)
        await self.refused(NotFound, provider.set_firewall("qemu-" + "0" * 32, CLOSED))
        self.assertEqual(provider.refusals(instance.id), {})
        await self.within(provider.destroy(instance.id))
        await self.within(provider.stop())
        await firewalls.BridgeFirewalls(reactor, self.bridge).remove()

    async def test_what_a_killed_daemon_was_copying_goes_with_the_next_ones_start(self) -> None:
        left = self.state_dir / "qemu" / "volumes" / "data.raw.new"
        left.parent.mkdir(parents=True)
        left.touch()
        await self.started()
        await self.until(lambda: not left.exists(), "it is removed")

    async def test_before_its_start_a_daemon_knows_which_vms_hold_the_subnet(self) -> None:
        """kubelet may tell the node's subnet before the guest image is there."""
        provider = await self.started()
        instance = await self.running(provider, self.spec())
        await self.within(provider.stop())
        waiting = self.make_provider()
        error = await self.refused(FailedPrecondition, waiting.configure_network(self.other_cidr))
        self.assertIn(instance.address, str(error))
        await self.within(waiting.configure_network(self.pod_cidr))
        await self.end_from_outside(instance)
        await self.until(lambda: not self.pids(instance), "it has ended")
        await self.within(waiting.configure_network(self.other_cidr))

    async def test_the_upkeep_waits_while_the_network_is_being_changed(self) -> None:
        provider: Any = await self.started()
        repaired: list[object] = []

        async def repair(ports: object) -> None:
            repaired.append(ports)

        self.patch(provider._pod_network, "restore_tables", repair)
        async with provider._pod_network.lock:
            upkeep = start(provider._maintenance.round())
            await self.until(lambda: provider._pod_network.lock.waiting, "it waits", 60.0)
            self.assertEqual(repaired, [])
        await upkeep
        self.assertEqual(repaired, [[]])

    async def test_an_agent_is_called_by_its_own_port_if_it_says_so(self) -> None:
        """The next daemon knows that, too, before it has started; and what each says is of its own VM."""
        provider: Any = await self.started()
        by_tcp = await self.running(provider, self.spec())
        by_port = self.place / BY_PORT
        by_port.touch()
        self.addCleanup(by_port.unlink)
        instance = await self.running(provider, self.spec())
        self.assertEqual((by_tcp.agent_port, instance.agent_port), (PORT, AGENT_PORT))
        for daemon in (provider, self.make_provider()):
            self.assertIsInstance(daemon.agent_endpoint(instance.id), AgentPortEndpoint)
            for other in (by_tcp.id, "qemu-" + "0" * 32, "../" + instance.id, ""):
                self.assertIsNone(daemon.agent_endpoint(other))
        socket = self.run_dir / "qemu" / instance.token / AGENT
        self.assertEqual(socket.parent.stat().st_mode & 0o777, 0o700)
        self.assertFalse((self.run_dir / "qemu" / by_tcp.token / AGENT).exists())
        await self.within(provider.destroy(instance.id))
        self.assertIsNone(provider.agent_endpoint(instance.id))

    async def test_an_agent_that_says_nothing_ends_the_vm_in_time(self) -> None:
        self.settings["boot_timeout"] = 0.3
        self.silence_agents()
        provider = await self.started()
        ended: list[Instance] = []
        provider.watch(ended.append)
        launched = await self.within(provider.launch(self.spec()))
        error = await self.refused(Unavailable, provider.wait_running(launched.id, self.boot_timeout))
        self.assertIn("its agent's start took longer than 0.3 s", str(error))
        self.assertEqual(self.pids(launched), [])
        self.assertEqual([each.id for each in ended], [launched.id])

    async def test_a_daemon_that_stops_leaves_the_vms_that_start(self) -> None:
        """It does not go on to hand over an identity, nor end the VM because no agent answers."""
        self.silence_agents()
        provider: Any = await self.started()
        launched = await self.within(provider.launch(self.spec()))
        handover = provider._vms[launched.token].handover
        await provider.stop()
        self.assertTrue(handover.called)
        self.assertEqual(len(self.pids(launched)), 1)

    async def test_why_a_vm_ended_is_known_to_the_next_daemon(self) -> None:
        provider: Any = await self.started()
        instance = await self.running(provider, self.spec())
        ended: list[Instance] = []
        provider.watch(ended.append)
        await self.end_from_outside(instance)
        await self.until(lambda: ended, "the end is told")
        self.assertIn("SIGKILL", ended[0].detail)
        saved = self.vms() / instance.token / record.RECORD
        await self.until(lambda: "SIGKILL" in saved.read_text(), "the reason is saved")
        provider = await self.restarted(provider)
        self.assertEqual([each.detail for each in await provider.list()], [ended[0].detail])

    async def test_a_vm_that_ended_holds_no_subnet(self) -> None:
        provider = await self.started()
        ended: list[Instance] = []
        provider.watch(ended.append)
        await self.end_from_outside(await self.running(provider, self.spec()))
        await self.until(lambda: ended, "the end is told")
        await self.within(provider.configure_network(self.other_cidr))
        moved = await self.running(provider, self.spec())
        self.assertIn(ip_address(moved.address), ip_network(self.other_cidr))

    async def test_a_round_of_the_upkeep_that_fails_is_not_the_last(self) -> None:
        provider: Any = await self.started()

        async def fail(*_: object) -> None:
            raise RuntimeError("a bug")

        patch = self.patch(provider._pod_network, "restore_tables", fail)
        await provider._maintenance.round()
        patch.restore()
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 1)


@needs_netns
@needs_programs("qemu-img")
class TemplateTests(StandInCase, TestCase):
    """Making a template."""

    def setUp(self) -> Any:
        done = super().setUp()
        self.templates = self.state_dir / "templates"
        self.settings["template_dir"] = str(self.templates)
        return done

    async def test_it_is_made_once_and_whole(self) -> None:
        said: list[str] = []
        for _ in range(2):
            provider = self.make_provider()
            await provider.start(said.append)
            await provider.stop()
        self.assertEqual(len([words for words in said if words.startswith("the template is ready")]), 1)
        [template] = self.templates.glob("[0-9a-f]*")
        parts = {name: (template / name).stat() for name in PARTS}
        self.assertEqual({each.st_uid for each in parts.values()}, {0})
        self.assertEqual(parts[RAM].st_mode & 0o777, 0o600, "guests' memory is for the daemon alone")

    async def test_what_a_killed_daemon_left_half_made_goes_and_of_the_others_those_used_last_stay(
        self,
    ) -> None:
        for number, name in enumerate(("a1", "b2", "c3", "d4")):
            (self.templates / name).mkdir(parents=True)
            used = self.templates / name / "used"
            used.touch()
            os.utime(used, (1000 + number, 1000 + number))
        half = self.templates / ".build-killed"
        half.mkdir()
        (half / "ram").touch()
        script = ["-ISc", "import time; time.sleep(600)", "guest=infranetes-template-killed"]
        its = subprocess.Popen([sys.executable, *script])
        self.addCleanup(its.kill)
        await (await self.started()).stop()
        self.assertEqual(its.wait(10), -signal.SIGKILL)
        kept = {each.name for each in self.templates.iterdir() if each.is_dir()}
        self.assertFalse(half.exists())
        self.assertLess({"c3", "d4"}, kept)
        self.assertEqual(len(kept), 3)

    async def test_where_there_is_no_room_for_one_it_says_how_much_that_takes(self) -> None:
        usage = shutil.disk_usage("/")
        self.patch(shutil, "disk_usage", lambda path: usage._replace(free=1279 << 20))
        error = await self.refused(ResourceExhausted, self.make_provider().start(lambda words: None))
        self.assertIn("has 1279 MiB free, a template takes up to 1280 MiB", str(error))
        self.patch(shutil, "disk_usage", lambda path: usage._replace(free=1280 << 20))
        await (await self.started()).stop()

    async def test_its_guest_rests_before_it_is_kept(self) -> None:
        """Whatever it still does, each clone would do again. One that never rests is kept all the same."""
        self.patch(boot, "_IDLE_SECONDS", 0.05)
        self.patch(boot, "_SETTLE_SECONDS", 1.0)
        second = os.sysconf("SC_CLK_TCK")
        for busy, rests in ((3, True), (1 << 30, False)):
            looks: list[int] = []
            looked: list[int] = []  # by the time when the state is kept

            def ticks(pid: int, busy: int = busy, looks: list[int] = looks) -> int:
                looks.append(pid)
                return second * min(len(looks), busy)

            def progress(words: str, looks: list[int] = looks, looked: list[int] = looked) -> None:
                if "keeping" in words:
                    looked.append(len(looks))

            self.patch(boot, "_processor_ticks", ticks)
            self.settings["template_dir"] = str(self.templates / str(busy))
            await self.within(self.make_provider().start(progress), self.start_timeout)
            self.assertEqual(looked == [4], rests, looked)
            self.assertEqual(looked, [len(looks)])
            self.assertGreaterEqual(looked[0], 4)
            await self.providers[-1].stop()

    async def test_images_of_the_configuration_are_a_part_of_it(self) -> None:
        archive = self.state_dir / "images.bundle"
        archive.write_bytes(b"images")

        async def preload(progress: Progress) -> Preload:
            return Preload("key", archive)

        context = attrs.evolve(self.context(), preload=preload)
        self.patch(self, "context", lambda *_: context)
        self.settings["image_dir"] = str(self.state_dir / "docker-images")
        make_image(self.state_dir / "docker-images", "docker")
        provider = await self.started()
        await self.running(provider, self.spec())
        [template] = self.templates.glob("[0-9a-f]*")
        self.assertEqual((template / IMAGES).read_bytes(), b"images")

    async def test_a_boot_that_fails_leaves_nothing(self) -> None:
        program = self.wrapper('case "$*" in *incoming*|--version) ;; *) echo no luck; exit 1;; esac')
        self.settings["qemu"] = program
        error = await self.refused(Unavailable, self.make_provider().start(lambda words: None))
        self.assertIn("no luck", str(error))
        self.assertEqual([each.name for each in self.templates.iterdir()], ["lock"])
        self.assertEqual(list((self.run_dir / "qemu").glob("template-*")), [])
        self.settings["qemu"] = self.qemu

    async def test_whoever_waits_for_another_daemon_says_so_once_and_not_for_ever(self) -> None:
        self.templates.mkdir()
        self.settings["template_timeout"] = 1.2
        said: list[str] = []
        with (self.templates / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            await self.refused(DeadlineExceeded, self.make_provider().start(said.append))
        self.assertEqual(len([words for words in said if "another daemon" in words]), 1)
        self.settings["template_timeout"] = 60.0
