# SPDX-License-Identifier: Apache-2.0
"""KVM has to prove that it works, for a user who may open it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase, TestCase

from infranetes.providers.qemu.host import accelerator, kvm
from infranetes.providers.qemu.host.kvm import look_at_kvm, qemu_user
from infranetes.providers.qemu.host.privileges import QemuUser
from infranetes.providers.qemu.program.process import pids_by_argument
from infranetes_common import commands
from infranetes_common.errors import FailedPrecondition
from infranetes_common.reactors import installed
from tests.harness.needs import needs_root
from tests.support.waiting import until

reactor = installed()
QEMU = "/usr/bin/qemu-system-x86_64"
ME = QemuUser(os.getuid(), os.getgid())


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

    def test_a_user_that_is_not_there_is_named_with_the_way_to_make_it(self) -> None:
        with self.assertRaises(FailedPrecondition) as caught:
            qemu_user("no-such-user")
        self.assertIn("useradd --system", str(caught.exception))

    def test_a_number_is_a_user_that_the_node_need_not_know(self) -> None:
        self.assertEqual(qemu_user("1900010000")[:2], (1900010000, 1900010000))


@needs_root
class DependencyTests(SynchronousTestCase):
    """Tests here need root and Debian's tools, and fail without them."""

    def test_this_runs_as_root_with_the_tools(self) -> None:
        self.assertEqual(os.geteuid(), 0, "bridges and taps are made by root")
        for program in ("ip", "nft", "setpriv", "setsid", QEMU, "qemu-img"):
            commands.find_program(program)
