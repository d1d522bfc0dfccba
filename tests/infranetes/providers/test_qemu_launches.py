# SPDX-License-Identifier: Apache-2.0
"""The QEMU provider's contract and launches, with a program in QEMU's place."""

from __future__ import annotations

import fcntl
import json
import threading
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

from twisted.trial.unittest import TestCase

from infranetes.providers.interface import Instance, Size
from infranetes.providers.qemu import bridge, clone, record, template_boot, uids
from infranetes.providers.qemu.settings import QemuSettings
from infranetes.providers.qemu.template import PARTS, RAM
from infranetes_common.errors import DeadlineExceeded, Unavailable
from tests.contract.leased_addresses import LeasedAddressContract
from tests.contract.pod_provider import LaunchContract
from tests.e2e.qemu_launches import QemuLaunches
from tests.harness.durations import slow
from tests.harness.needs import needs_netns, needs_programs
from tests.infranetes.providers.stand_in_case import StandInCase


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
        self.patch(template_boot, "open_tap", open_tap)
        self.settings["template_dir"] = str(self.place / "templates-of-this-test")
        await self.running(await self.started(), self.spec())
        self.assertEqual(len(threads), 2)
        self.assertNotIn(threading.get_ident(), threads)

    async def test_a_size_beyond_the_templates_is_plugged_in(self) -> None:
        provider = await self.started()
        size = Size(cpu_millis=1500, memory_bytes=1 << 30)
        instance = await self.running(provider, self.spec(size=size))
        console = (self.vms() / instance.token / record.CONSOLE).read_text().splitlines()
        plugged = [json.loads(line)["device_add"] for line in console if "device_add" in line]
        self.assertEqual([each for each in plugged if each.startswith("cpu")], ["cpu1"])
        self.assertTrue([each for each in plugged if each.startswith("dimm")], plugged)

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
