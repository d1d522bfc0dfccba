# SPDX-License-Identifier: Apache-2.0
"""A user for each VM."""

from __future__ import annotations

import os
import pwd
import signal
import subprocess
import tempfile

from twisted.internet.defer import gatherResults
from twisted.trial.unittest import TestCase

from infranetes.providers.qemu.host import uids
from infranetes.providers.qemu.host.privileges import QemuUser, unprivileged
from infranetes.providers.qemu.host.uids import UidRange
from infranetes.providers.qemu.settings import QemuSettings
from infranetes_common.concurrency import start
from infranetes_common.config import structure
from infranetes_common.errors import ConfigError, InvalidArgument, ResourceExhausted
from infranetes_common.reactors import installed
from tests.harness.needs import needs_root
from tests.support.waiting import until

reactor = installed()
RANGE = UidRange(1_900_020_000, 1_900_020_031)  # not what a daemon here uses
NOT_ONES_OWN = UidRange(0, 15)  # system accounts that exist on every node


class UserTests(TestCase):
    """Users for VMs."""

    async def sleeping(self, uid: int) -> subprocess.Popen[bytes]:
        """Start a process of that user."""
        command = unprivileged(["sleep", "600"], QemuUser(uid, uid), dies_with_parent=True, own_session=False)
        process = subprocess.Popen(command)

        def end() -> None:
            process.kill()
            process.wait()

        self.addCleanup(end)
        await until(lambda: uid in {owner for owner, _ in uids._processes()}, "it runs")
        return process

    def test_the_next_one_is_chosen_and_the_first_follows_the_last(self) -> None:
        first = uids.next_free(RANGE, (), None)
        self.assertIn(first, RANGE)
        self.assertEqual(uids.next_free(RANGE, (), RANGE.first), RANGE.first + 1)
        self.assertEqual(uids.next_free(RANGE, (), RANGE.last), RANGE.first)
        self.assertEqual(
            uids.next_free(RANGE, {RANGE.first + 1, RANGE.first + 2}, RANGE.first), RANGE.first + 3
        )

    def test_daemons_begin_apart(self) -> None:
        self.assertGreater(len({uids.next_free(RANGE, (), None) for _ in range(20)}), 3)

    def test_all_taken(self) -> None:
        with self.assertRaises(ResourceExhausted) as caught:
            uids.next_free(RANGE, range(RANGE.first, RANGE.last + 1), None)
        self.assertIn("providers.qemu.uids", str(caught.exception))

    def test_whoever_has_an_account_is_left_out(self) -> None:
        pwd.getpwuid(NOT_ONES_OWN.first)
        accounts = {entry.pw_uid for entry in pwd.getpwall()}
        free = UidRange(NOT_ONES_OWN.first, 5000)
        self.assertNotIn(uids.next_free(free, (), 4999), accounts)
        self.assertGreater(uids.next_free(free, (), 5000), 1)

    @needs_root
    async def test_whoever_has_a_process_is_left_out_until_it_is_ended(self) -> None:
        wanted = RANGE.first + 5
        process = await self.sleeping(wanted)
        self.assertEqual(uids.next_free(RANGE, (), wanted - 1), wanted + 1)
        for _ in range(2):
            uids.kill_processes(wanted)
        self.assertEqual(process.wait(10), -signal.SIGKILL)
        self.assertEqual(uids.next_free(RANGE, (), wanted - 1), wanted)

    def test_root_has_no_vm_whose_processes_could_be_ended(self) -> None:
        signalled: list[int] = []
        self.patch(os, "kill", lambda pid, signal: signalled.append(pid))
        for uid in (0, -1):
            self.assertRaises(InvalidArgument, uids.kill_processes, uid)
        self.assertEqual(signalled, [])

    @needs_root
    def test_whoever_has_a_file_where_all_may_write_is_left_out(self) -> None:
        wanted = RANGE.first + 9
        with tempfile.NamedTemporaryFile() as file:
            os.chown(file.name, wanted, wanted)
            self.assertEqual(uids.next_free(RANGE, (), wanted - 1), wanted + 1)
        self.assertEqual(uids.next_free(RANGE, (), wanted - 1), wanted)

    def test_ranges_that_can_not_be(self) -> None:
        self.assertEqual(uids.parse("1900000000-1900009999"), UidRange(1900000000, 1900009999))
        for words in (
            "",
            "5",
            "a-b",
            "0-99",
            "10-20",
            "99-10",
            "65000-66000",
            "1-99999999999",
            "4294967200-4294967295",
        ):
            self.assertRaises(InvalidArgument, uids.parse, words)
            with self.assertRaises(ConfigError) as caught:
                structure({"uids": words}, QemuSettings, source="x", prefix="providers.qemu")
            self.assertIn("providers.qemu.uids", str(caught.exception))


class ChoiceTests(TestCase):
    """Uids that are given out."""

    async def test_what_asks_at_once_gets_others_until_they_are_given_back(self) -> None:
        few = uids.UidRange(RANGE.first, RANGE.first + 3)
        in_use = {few.first + 1}
        choice = uids.UidChoice(reactor, few, lambda: in_use)
        lent = await gatherResults([start(choice.lend()) for _ in range(3)])
        self.assertEqual({*lent, *in_use}, {few.first + number for number in range(4)})
        for _ in range(2):
            with self.assertRaises(ResourceExhausted):
                await choice.lend()
        choice.give_back(lent[1])
        self.assertEqual(await choice.lend(), lent[1])
        in_use.add(lent[0])
        for _ in range(2):
            choice.give_back(lent[0])
        with self.assertRaises(ResourceExhausted):
            await choice.lend()
