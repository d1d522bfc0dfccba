# SPDX-License-Identifier: Apache-2.0
"""VMs that are kept: a real QEMU without a guest, what can go wrong, and daemons that are killed."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NoReturn

import attrs
from twisted.internet.defer import CancelledError, Deferred, fail
from twisted.trial.unittest import TestCase

from infranetes.providers.keeping import IKeepsVms, IStartsKeptVms, KeptVm
from infranetes.providers.qemu.keep import keeper, pipe
from infranetes.providers.qemu.keep.capture import Capture
from infranetes.providers.qemu.keep.hardware import Hardware
from infranetes.providers.qemu.keep.keeper import Keeper
from infranetes.providers.qemu.keep.layer import KeepLayer
from infranetes.providers.qemu.keep.state import MEMORY
from infranetes.providers.qemu.program.qmp import QmpConnection, QmpError
from infranetes.providers.qemu.template.template import DISK
from infranetes.providers.qemu.vm.record import Guest
from infranetes.providers.qemu.vm.vm import Vm
from infranetes_common.concurrency import sleep, start
from infranetes_common.errors import FailedPrecondition, InfranetesError, ResourceExhausted, Unavailable
from tests.contract.kept_vms import SECONDS
from tests.contract.started_kept_vms import StartedKeptVmsContract
from tests.harness.durations import slow
from tests.harness.needs import needs_mounts, needs_qemu
from tests.infranetes.providers.qemu.keep.case import KeepCase, Keeping, reactor, reads
from tests.support.file_systems import mounted

_BEFORE, _MEANWHILE = "-P 7 1M 64k", "-P 9 2M 64k"


class Killed(Exception):
    """The end of a daemon, from which on it does nothing more."""


class _Commands:
    """QEMU's commands, counted. :ivar broken_at: the number of the one that fails; 0: none does."""

    def __init__(self, case: TestCase, error: Exception, for_ever: bool) -> None:
        self.count = self.broken_at = 0
        self.names: list[str] = []
        self._error = error
        self._for_ever = for_ever
        self._execute = QmpConnection.execute
        case.patch(QmpConnection, "execute", lambda *given, **named: self._run(*given, **named))

    def _run(self, qmp: QmpConnection, name: str, *given: Any, **named: Any) -> Deferred[Any]:  # Any: as it
        self.count += 1
        self.names.append(name)
        past = self._for_ever and self.count > self.broken_at
        if self.broken_at and (self.count == self.broken_at or past):
            return fail(self._error)
        return self._execute(qmp, name, *given, **named)

    def break_at(self, number: int) -> None:
        self.count, self.broken_at = 0, number


@needs_qemu
class QemuKeepTests(KeepCase, StartedKeptVmsContract, TestCase):
    """The contract, over a QEMU that has no guest; and its faults."""

    async def keeper(self) -> IStartsKeptVms:
        return self.keeping({})

    async def machine(self, keeper: IKeepsVms) -> str:
        vm = self.vm()
        _keeping(keeper).vms[vm.record.id] = vm
        return vm.record.id

    async def launched(self, keeper: IKeepsVms, directory: Path) -> str:
        vm = await self.started_from(directory)
        _keeping(keeper).vms[vm.record.id] = vm
        return vm.record.id

    async def assert_executes(self, keeper: IKeepsVms, machine: str) -> None:
        await self.assert_as_before(_keeping(keeper).vms[machine])

    async def next_daemon(self, keeper: IKeepsVms) -> IStartsKeptVms:
        return self.keeping({id: self.found_again(vm) for id, vm in _keeping(keeper).vms.items()})

    async def end(self, keeper: IKeepsVms, machine: str) -> None:
        await self.killed(_keeping(keeper).vms[machine])

    async def assert_unchanged(self, keeper: IKeepsVms, machine: str) -> None:
        await self.assert_as_before(_keeping(keeper).vms[machine])

    # ---- What is kept

    async def one(self) -> tuple[Keeping, Vm]:
        vm = self.vm()
        await self.write(vm, _BEFORE)
        return self.keeping({vm.record.id: vm}), vm

    async def kept(self, keeping: Keeping, vm: Vm) -> tuple[KeptVm, Path]:
        directory = self.directory()
        return await keeping.keep(vm.record.id, directory, SECONDS), directory

    async def has(self, vm: Vm, what: str) -> bool:
        """Return whether the VM's own disk has it."""
        return reads(vm.paths.disk, what, shared=True)

    async def test_the_disk_is_that_of_the_instant_and_the_vm_goes_on_with_its_own(self) -> None:
        keeping, vm = await self.one()
        copy = Keeper._copy_disk

        async def write_and_copy(self_: Keeper, vm: Vm, directory: Path) -> None:
            await self.write(vm, _MEANWHILE)
            await copy(self_, vm, directory)

        self.patch(Keeper, "_copy_disk", write_and_copy)
        _, directory = await self.kept(keeping, vm)
        self.assertTrue(reads(directory / DISK, _BEFORE))
        self.assertFalse(reads(directory / DISK, _MEANWHILE))
        await self.assert_as_before(vm)
        self.assertTrue(await self.has(vm, _BEFORE))
        self.assertTrue(await self.has(vm, _MEANWHILE))

    async def test_another_qemu_can_load_what_was_kept(self) -> None:
        keeping, vm = await self.one()
        kept, directory = await self.kept(keeping, vm)
        self.assertGreater(kept.files[MEMORY], 8 << 20)
        self.assertLess(kept.files[MEMORY], 64 << 20, "pages of zeros take no room")
        loaded = await self.loaded(directory / MEMORY, directory / DISK)
        self.assertEqual(loaded, "completed")
        cut = directory / "cut"
        cut.write_bytes((directory / MEMORY).read_bytes()[: kept.files[MEMORY] // 2])
        self.assertEqual(await self.loaded(cut, directory / DISK), "failed")

    async def test_it_says_what_it_was_taken_of(self) -> None:
        keeping, vm = await self.one()
        kept, _ = await self.kept(keeping, vm)
        self.assertIn("QEMU ", kept.machine["hypervisor"])
        self.assertEqual(kept.machine["accelerator"], "tcg")
        self.assertEqual(kept.machine["memory"], str(64 << 20))
        self.assertEqual(kept.machine["processors"], "1")
        self.assertEqual(kept.machine["template"], vm.record.template)
        self.assertEqual(kept.machine["guest-image"], vm.record.image)

    async def test_an_emulated_vm_is_stopped_before_anything_is_written(self) -> None:
        """QEMU misses what such a VM changes meanwhile."""
        keeping, vm = await self.one()
        commands = _Commands(self, Killed("never"), False)
        await self.kept(keeping, vm)
        begun = commands.names.index("migrate")
        self.assertIn("stop", commands.names[:begun])

    async def test_with_kvm_a_vm_executes_while_its_memory_is_written(self) -> None:
        keeping, vm = await self.one()
        self.patch(Hardware, "emulated", False)
        commands = _Commands(self, Killed("never"), False)
        kept, directory = await self.kept(keeping, vm)
        self.assertNotIn("stop", commands.names)
        self.assertGreater(kept.pause_seconds, 0)
        await self.assert_as_before(vm)
        self.assertEqual(await self.loaded(directory / MEMORY, directory / DISK), "completed")

    # ---- What is refused

    async def test_a_vm_with_volumes_is_refused_by_their_names(self) -> None:
        keeping, vm = await self.one()
        keeping.volumes = frozenset({"vol-a", "vol-b"})
        for _ in range(2):
            words = await self.fails(FailedPrecondition, self.kept(keeping, vm))
            self.assertIn("vol-a, vol-b", words)
            await self.assert_as_before(vm)

    async def test_a_vm_that_boots_an_image_is_refused(self) -> None:
        keeping, vm = await self.one()
        vm.record = attrs.evolve(vm.record, guest=Guest(1))
        for _ in range(2):
            await self.fails(FailedPrecondition, self.kept(keeping, vm))

    async def test_memory_that_no_clone_has_touched_is_not_charged_to_the_pod(self) -> None:
        keeping, vm = await self.one()
        keeping.room = (64 << 20) - 1
        for _ in range(2):
            self.assertIn("limit", await self.fails(FailedPrecondition, self.kept(keeping, vm)))
            await self.assert_as_before(vm)
        vm.ram = self.memory[vm.record.id]
        self.assertLess(os.fstat(vm.ram.fileno()).st_blocks * 512, 32 << 20)
        stream = Keeper._stream

        async def look_and_stream(*given: Any) -> None:
            self.assertEqual(os.fstat(self.memory[vm.record.id].fileno()).st_blocks * 512, 64 << 20)
            await stream(*given)

        self.patch(Keeper, "_stream", look_and_stream)
        await self.kept(keeping, vm)

    async def test_a_disk_that_names_other_files_does_so_no_more(self) -> None:
        keeping, vm = await self.one()
        _, directory = await self.kept(keeping, vm)
        about = subprocess.run(
            ["qemu-img", "info", "--output=json", directory / DISK], capture_output=True, check=True
        )
        self.assertNotIn("backing-filename", json.loads(about.stdout))
        subprocess.run(["qemu-img", "check", "-q", directory / DISK], check=True)
        with vm.paths.disk.open("r+b") as disk:  # as a QEMU that was taken over may do
            disk.seek(72)
            disk.write((1 << 2).to_bytes(8, "big"))
        self.assertIn("taken over", await self.fails(FailedPrecondition, self.kept(keeping, vm)))

    # ---- What can go wrong

    @needs_mounts
    async def test_a_full_disk(self) -> None:
        keeping, vm = await self.one()
        directory = mounted(self, "tmpfs", 6 << 20)
        words = await self.fails(ResourceExhausted, keeping.keep(vm.record.id, directory, SECONDS))
        self.assertIn(str(directory), words)
        self.assertEqual(list(directory.iterdir()), [])
        self.patch(keeper, "_check_room", lambda *given: None)  # it fills up meanwhile
        words = await self.fails(ResourceExhausted, keeping.keep(vm.record.id, directory, SECONDS))
        self.assertIn(os.strerror(errno.ENOSPC), words)
        await self.assert_as_before(vm)
        await self.kept(keeping, vm)

    async def test_a_qemu_that_writes_without_end(self) -> None:
        keeping, vm = await self.one()
        self.patch(keeper, "_MOST_TIMES", 0)
        self.patch(keeper, "_SPARE", 1 << 20)
        await self.fails(ResourceExhausted, self.kept(keeping, vm))
        await self.assert_as_before(vm)

    @slow(20, "QEMU refuses each of its commands once")
    async def test_each_of_qemus_commands_may_be_refused(self) -> None:
        keeping, vm = await self.one()
        commands = _Commands(self, QmpError("QEMU refuses that today"), False)
        await self.kept(keeping, vm)
        for number in range(1, commands.count + 1):
            commands.break_at(number)
            try:
                await self.kept(keeping, vm)
            except InfranetesError as error:
                self.assertIsInstance(error, Unavailable, number)
            commands.break_at(0)
            await keeping.keeper.tidy()
            await self.assert_as_before(vm)
        self.assertTrue(await self.has(vm, _BEFORE))

    @slow(30, "a daemon is killed before each of QEMU's commands")
    async def test_a_killed_daemon_is_made_up_for_by_the_next_one(self) -> None:
        keeping, vm = await self.one()
        commands = _Commands(self, Killed("that was the end of the daemon"), True)
        await self.kept(keeping, vm)
        for number in range(1, commands.count + 1):
            commands.break_at(number)
            with contextlib.suppress(Killed):
                await self.kept(keeping, vm)
            commands.break_at(0)
            vm = self.found_again(vm)
            keeping = self.keeping({vm.record.id: vm})
            for _ in range(2):
                await keeping.keeper.resume([vm])
            await self.assert_as_before(vm)
        self.assertTrue(await self.has(vm, _BEFORE))

    async def test_a_daemon_that_stops_lets_the_vm_go_on(self) -> None:
        keeping, vm = await self.one()
        call = self.kept(keeping, vm)
        waiting = Deferred.fromCoroutine(call)
        await sleep(reactor, 0.05)
        for _ in range(2):
            await keeping.keeper.stop()
        await self.fails(Unavailable, waiting)
        await self.fails(Unavailable, self.kept(keeping, vm))
        vm = self.found_again(vm)
        await self.assert_as_before(vm)

    async def test_a_daemon_that_stops_ends_all_that_is_under_way(self) -> None:
        vms = [self.vm() for _ in range(3)]
        keeping = self.keeping({vm.record.id: vm for vm in vms})

        async def wait(*_: object) -> NoReturn:
            await Deferred()
            raise AssertionError

        self.patch(Keeper, "_keep", wait)
        waiting = [start(self.kept(keeping, vm)) for vm in vms]
        stopping = start(keeping.keeper.stop())
        self.assertTrue(stopping.called)
        for one in waiting:
            await self.assertFailure(one, Unavailable)

    async def test_a_daemon_that_stops_waits_for_what_the_vm_is_given_back(self) -> None:
        keeping, vm = await self.one()
        begun: Deferred[None] = Deferred()
        remove = KeepLayer.remove

        async def told(layer: KeepLayer) -> None:
            if not begun.called:
                begun.callback(None)
            await remove(layer)

        self.patch(KeepLayer, "remove", told)
        waiting = Deferred.fromCoroutine(self.kept(keeping, vm))
        await begun
        await sleep(reactor, 0)
        await keeping.keeper.stop()
        await self.assert_as_before(vm)
        await self.fails(Unavailable, waiting)

    async def test_its_hardware_stays_until_it_executes_however_often_that_is_cancelled(self) -> None:
        keeping, vm = await self.one()
        steps: list[str] = []
        begun: Deferred[None] = Deferred()
        held: Deferred[None] = Deferred()
        go_on = Capture.let_go_on

        async def slowly(capture: Capture) -> None:
            if not begun.called:
                begun.callback(None)
            await held
            await go_on(capture)
            steps.append("executes")

        @contextlib.asynccontextmanager
        async def unchanged(vm: Vm) -> AsyncIterator[frozenset[str]]:
            try:
                yield frozenset()
            finally:
                steps.append("may change")

        self.patch(keeping.keeper, "_unchanged", unchanged)
        self.patch(Capture, "let_go_on", slowly)
        call = start(keeping.keeper._keep(vm, self.directory(), SECONDS))
        await begun
        await sleep(reactor, 0)
        for _ in range(2):  # the keeper ends it, and its deadline passes
            call.cancel()
        self.assertEqual(steps, [])
        held.callback(None)
        await self.assertFailure(call, CancelledError)
        self.assertEqual(steps[:2], ["executes", "may change"])
        await self.assert_as_before(vm)

    async def test_a_vm_that_is_gone_leaves_nothing_to_do(self) -> None:
        keeping, vm = await self.one()
        commands = _Commands(self, Killed("that was the end of the daemon"), True)
        commands.break_at(8)
        await self.assertFailure(Deferred.fromCoroutine(self.kept(keeping, vm)), Killed)
        commands.break_at(0)
        await self.killed(vm)
        await keeping.keeper.resume([vm])
        self.assertEqual(list(vm.paths.directory.glob("keep*")), [])

    async def test_the_daemon_keeps_no_descriptors(self) -> None:
        keeping, vm = await self.one()
        await self.kept(keeping, vm)
        before = len(os.listdir("/proc/self/fd"))
        await self.kept(keeping, vm)
        self.patch(pipe, "_PIPE_BYTES", -1)
        await self.fails(InfranetesError, self.kept(keeping, vm))
        self.assertEqual(len(os.listdir("/proc/self/fd")), before)


def _keeping(keeper: object) -> Keeping:
    assert isinstance(keeper, Keeping)
    return keeper
