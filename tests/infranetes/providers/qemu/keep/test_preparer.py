# SPDX-License-Identifier: Apache-2.0
"""Kept VMs that others start from: what they have, what can go wrong, and daemons that are killed."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
from pathlib import Path
from typing import Any

import attrs
from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.threads import deferToThread
from twisted.trial.unittest import TestCase

from infranetes.providers.interface import ReadOnlyDisk
from infranetes.providers.qemu.keep import preparer, state
from infranetes.providers.qemu.keep.preparer import Preparer
from infranetes.providers.qemu.keep.state import MANIFEST, MEMORY, thd_read
from infranetes.providers.qemu.program.process import WatchedProcess, pids_by_argument
from infranetes.providers.qemu.template.template import DISK, OVERLAY, RAM, STATE
from infranetes.providers.qemu.vm.connections import VmConnections
from infranetes.providers.qemu.vm.disks import Disks
from infranetes.providers.qemu.vm.vm import Vm
from infranetes_common.concurrency import sleep, start
from infranetes_common.errors import FailedPrecondition, InfranetesError, ResourceExhausted, Unavailable
from tests.contract.kept_vms import SECONDS
from tests.harness.durations import slow
from tests.harness.needs import needs_mounts, needs_qemu
from tests.infranetes.providers.qemu.keep.case import KeepCase, Keeping, reactor, reads
from tests.support.failures import FailureAssertions
from tests.support.file_systems import mounted

_BEFORE, _LATER = "-P 7 1M 64k", "-P 9 2M 64k"
_FILES = {"hardware.json", "manifest.json", DISK, RAM, STATE, OVERLAY}
_LOADERS = "guest=infranetes-keep-"


@needs_qemu
class PreparerTests(KeepCase, FailureAssertions, TestCase):
    """A VM is kept, and others start from it, over QEMUs without a guest."""

    async def kept(self, vm: Vm | None = None) -> tuple[Keeping, Vm, Path]:
        """Keep a VM, a new one by default, in a new directory."""
        vm = vm or self.vm()
        keeping = self.keeping({vm.record.id: vm})
        directory = self.place / f"kept-{secrets.token_hex(4)}"
        directory.mkdir(0o700)
        await keeping.keep(vm.record.id, directory, SECONDS)
        return keeping, vm, directory

    async def prepared(self, vm: Vm | None = None) -> tuple[Keeping, Vm, Path]:
        """Likewise, and prepare it."""
        keeping, vm, directory = await self.kept(vm)
        await keeping.prepare(directory, SECONDS)
        return keeping, vm, directory

    async def memory_of(self, vm: Vm) -> str:
        """Return a part of a VM's memory that the test has filled at random."""
        qmp = (await vm.monitor(reactor)).qmp
        words = await qmp.execute("human-monitor-command", command_line="xp /64xb 0x1000000")
        self.assertIn("0000000001000000", words)
        return str(words)

    def loaders(self) -> list[str]:
        """Return the arguments of processes that load a kept VM, and what is left of them."""
        left = [each.name for each in (self.place / "run").iterdir()]
        names = [f"{_LOADERS}{each.removeprefix('keep-')}" for each in left]
        return [*left, *pids_by_argument(names)]

    async def assert_usable(self, keeping: Keeping, directory: Path) -> None:
        """Assert that a directory has what VMs start from, and that nothing else is left."""
        self.assertEqual({each.name for each in directory.iterdir()}, _FILES)
        self.assertEqual(self.loaders(), [])
        self.assertEqual(keeping.uids.lent, set())
        await self.assert_as_before(await self.started_from(directory))

    # ---- What VMs start with

    async def test_they_have_its_memory_and_its_disk_and_change_neither(self) -> None:
        vm = self.vm()
        await self.write(vm, _BEFORE)
        _, _, directory = await self.prepared(vm)
        self.assertEqual({each.name for each in directory.iterdir()}, _FILES)
        one, other = [await self.started_from(directory) for _ in range(2)]
        memory = await self.memory_of(vm)
        self.assertEqual([await self.memory_of(each) for each in (one, other)], [memory] * 2)
        self.assertIs(one.ram, other.ram, "they share it")
        await self.write(one, _LATER)
        self.assertEqual(
            [reads(each.paths.disk, _LATER, True) for each in (one, other, vm)], [True, False, False]
        )
        self.assertIn(str(directory / DISK), self.open_files(one))
        self.assertTrue(reads(directory / DISK, _BEFORE, True))
        self.assertEqual(thd_read(directory, self.template).disk, 64 << 20)

    async def test_memory_is_had_as_long_as_a_vm_has_it(self) -> None:
        _, _, directory = await self.prepared()
        vm = await self.started_from(directory)
        self.memory.clear()
        memories = self.ram._memories
        self.assertEqual(len(memories), 1)
        await vm.release(reactor)
        self.assertEqual(len(memories), 0)

    async def test_they_have_its_disks_at_the_same_places(self) -> None:
        """Their files outlive their image."""
        vm, images = self.vm(), self.place / "images"
        images.mkdir()
        disks = [ReadOnlyDisk(secrets.token_hex(32), images / str(number)) for number in range(3)]
        for disk in disks:
            disk.path.write_bytes(os.urandom(1 << 20))
        shower = Disks(reactor)
        await shower.show(vm, disks[:2])
        await shower.hide(vm, [disks[0].name])
        await shower.show(vm, [disks[2]])
        shown = await shower.shown(vm)
        keeping, _, directory = await self.prepared(self.found_again(vm))
        shutil.rmtree(images)
        await keeping.check(directory)
        clone = await self.started_from(directory)
        self.assertEqual(await shower.shown(clone), shown)
        files = self.open_files(clone)
        for disk in disks[1:]:
            self.assertIn(str(directory / f"layer-{disk.name}"), files)
        with (directory / f"layer-{disks[1].name}").open("r+b") as file:
            file.write(b"another content")
        self.assertIn(disks[1].name, await self.fails(FailedPrecondition, keeping.check(directory)))
        shutil.rmtree(directory)
        self.assertEqual(await shower.shown(clone), shown)

    async def test_without_a_disks_file_it_says_so(self) -> None:
        vm = self.vm()
        disk = ReadOnlyDisk(secrets.token_hex(32), self.place / "layer")
        disk.path.write_bytes(bytes(1 << 20))
        await Disks(reactor).show(vm, [disk])
        keeping, _, directory = await self.kept(vm)
        disk.path.write_bytes(bytes(2 << 20))
        self.assertIn(
            "not the file", await self.fails(FailedPrecondition, keeping.prepare(directory, SECONDS))
        )
        disk.path.unlink()
        self.assertIn("is gone", await self.fails(FailedPrecondition, keeping.prepare(directory, SECONDS)))
        shutil.rmtree(vm.paths.shown)  # as in a VM of an earlier release
        keeping, _, directory = await self.kept(vm)
        self.assertIn(
            "earlier release", await self.fails(FailedPrecondition, keeping.prepare(directory, SECONDS))
        )

    async def test_a_disk_on_another_file_system_is_copied(self) -> None:
        vm = self.vm()
        disk = ReadOnlyDisk(secrets.token_hex(32), self.place / "layer")
        disk.path.write_bytes(os.urandom(1 << 20))
        await Disks(reactor).show(vm, [disk])

        def link(*given: object, **named: object) -> None:
            raise OSError(errno.EXDEV, "another file system")

        self.patch(os, "link", link)
        _, _, directory = await self.prepared(vm)
        self.assertEqual((directory / f"layer-{disk.name}").read_bytes(), disk.path.read_bytes())

    # ---- What is refused

    async def test_another_template_is_named(self) -> None:
        keeping, _, directory = await self.prepared()
        template = self.template
        self.template.seal(template.directory)  # made again, with the same key
        for work in (keeping.check, lambda path: keeping.prepare(path, SECONDS)):
            self.assertIn("another template", await self.fails(FailedPrecondition, work(directory)))
        other = attrs.evolve(template, command_line=attrs.evolve(template.command_line, version="QEMU 99"))
        keeping.template = attrs.evolve(other, directory=self.place / ("1" * 24))
        shutil.copytree(template.directory, keeping.template.directory)
        self.assertIn("QEMU 99", await self.fails(FailedPrecondition, keeping.check(directory)))

    async def test_a_vm_of_an_earlier_release_is_kept_and_starts_no_other(self) -> None:
        vm = self.vm()
        vm.record = attrs.evolve(vm.record, template_made_at="")
        keeping, _, directory = await self.kept(vm)
        for work in (keeping.prepare(directory, SECONDS), keeping.check(directory)):
            self.assertIn("recreate the pod", await self.fails(FailedPrecondition, work))

    async def test_a_vm_that_was_started_from_one_is_not_kept_itself(self) -> None:
        _, _, directory = await self.prepared()
        clone = await self.started_from(directory)
        self.assertIn(str(directory), await self.fails(FailedPrecondition, self.kept(clone)))
        await self.assert_as_before(clone)

    async def test_a_stream_that_is_cut_or_damaged(self) -> None:
        keeping, _, directory = await self.kept()
        memory = (directory / MEMORY).read_bytes()
        for content in (memory[: len(memory) // 2], memory[:100] + os.urandom(4096) + memory[4196:], b""):
            (directory / MEMORY).write_bytes(content)
            for _ in range(2):
                await self.fails(Unavailable, keeping.prepare(directory, SECONDS))
            self.assertFalse((directory / MANIFEST).exists())
            await self.fails(FailedPrecondition, keeping.check(directory))
        (directory / MEMORY).write_bytes(memory)
        for name in (RAM, STATE):  # of an attempt that was interrupted
            (directory / name).write_bytes(b"\xff" * (64 << 20))
        await keeping.prepare(directory, SECONDS)
        await self.assert_usable(keeping, directory)
        self.assertLess((directory / STATE).stat().st_size, 1 << 20)
        self.assertLess((directory / RAM).stat().st_blocks * 512, 32 << 20)

    async def test_what_loads_it_has_no_rights_and_can_not_fill_the_disk(self) -> None:
        keeping, _, directory = await self.kept()
        seen: list[dict[str, str]] = []
        load = VmConnections.load_state

        async def look_and_load(connections: VmConnections, seconds: float, *, memory: bool = False) -> None:
            await connections.qmp.execute("query-status")  # it is QEMU by now
            [sockets] = (self.place / "run").iterdir()
            name = f"{_LOADERS}{sockets.name.removeprefix('keep-')}"
            [pid] = (await deferToThread(pids_by_argument, [name]))[name]
            status = Path(f"/proc/{pid}/status").read_text()
            fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
            limits = Path(f"/proc/{pid}/limits").read_text().splitlines()
            seen.append({**fields, "files": next(each for each in limits if "Max file size" in each)})
            await load(connections, seconds, memory=memory)

        self.patch(VmConnections, "load_state", look_and_load)
        await keeping.prepare(directory, SECONDS)
        [fields] = seen
        self.assertEqual((fields["Groups"].strip(), fields["NoNewPrivs"], fields["Seccomp"]), ("", "1", "2"))
        self.assertEqual({fields[each].strip("0") for each in ("CapEff", "CapPrm", "CapBnd")}, {""})
        [user] = set(fields["Uid"].split() + fields["Gid"].split())
        self.assertGreaterEqual(int(user), 1_900_000_000)
        self.assertIn(str(128 << 20), fields["files"])
        for each in directory.iterdir():
            self.assertEqual((each.stat().st_uid, each.stat().st_mode & 0o777), (0, 0o600), each)

    # ---- What can go wrong

    @needs_mounts
    async def test_a_full_disk(self) -> None:
        keeping, _, kept = await self.kept()
        small = mounted(self, "tmpfs", 24 << 20)
        directory = Path(shutil.copytree(kept, small / "kept"))
        words = await self.fails(ResourceExhausted, keeping.prepare(directory, SECONDS))
        self.assertIn(str(directory), words)
        self.patch(preparer, "_SPARE", 0)
        (small / "ballast").write_bytes(bytes(10 << 20))
        self.patch(shutil, "disk_usage", _room_once(shutil.disk_usage))
        words = await self.fails(ResourceExhausted, keeping.prepare(directory, SECONDS))
        self.assertIn("make room", words)
        self.assertEqual(self.loaders(), [])

    async def test_the_same_one_at_once_is_prepared_once(self) -> None:
        keeping, _, directory = await self.kept()
        started: list[object] = []
        load = VmConnections.load_state

        async def count_and_load(connections: VmConnections, seconds: float, *, memory: bool = False) -> None:
            started.append(connections)
            await load(connections, seconds, memory=memory)

        self.patch(VmConnections, "load_state", count_and_load)
        await gatherResults([keeping.prepare(directory, SECONDS) for _ in range(3)])
        self.assertEqual(len(started), 1)
        await self.assert_usable(keeping, directory)

    @slow(60, "a preparation is cancelled at many moments, and daemons are killed at them")
    async def test_it_may_be_interrupted_at_any_moment(self) -> None:
        keeping, _, directory = await self.kept()
        saved = {each.name: each.read_bytes() for each in directory.iterdir()}
        for step in range(16):
            for name in _FILES - set(saved):
                (directory / name).unlink(missing_ok=True)
            for name, content in saved.items():
                (directory / name).write_bytes(content)
            preparing = keeping.prepare(directory, SECONDS)
            preparing.addErrback(lambda failure: None)
            await sleep(reactor, step * 0.1)
            if step % 2:
                preparing.cancel()
                await preparing
            else:
                await keeping.preparer.stop()  # of the daemon
            self.assertEqual(self.loaders(), [], step)
            await keeping.prepare(directory, SECONDS)
            await self.assert_usable(keeping, directory)

    async def test_a_daemon_that_stops_ends_all_that_is_under_way(self) -> None:
        keeping = self.keeping({})

        async def wait(*_: object) -> None:
            await Deferred()

        self.patch(Preparer, "_in_turn", wait)
        waiting = [keeping.prepare(self.place / str(number), SECONDS) for number in range(3)]
        stopping = start(keeping.preparer.stop())
        self.assertTrue(stopping.called)
        for one in waiting:
            await self.fails(Unavailable, one)

    @slow(8, "each of its steps fails twice")
    async def test_each_of_its_steps_may_fail(self) -> None:
        keeping, _, directory = await self.kept()
        for place, name in (
            (preparer, "connect_silently"),
            (preparer, "add_plugged"),
            (preparer, "save_state"),
            (preparer, "check"),
            (preparer, "thd_link"),
            (preparer, "thd_seal"),
            (state, "replace_file"),
        ):
            writes = name in ("thd_seal", "replace_file")
            error = OSError(errno.EIO, "a disk's fault") if writes else Unavailable("QEMU does not today")

            def fail(*given: Any, _error: Exception = error, **named: Any) -> Deferred[None]:
                raise _error

            patched = self.patch(place, name, fail)
            for _ in range(2):
                await self.fails(InfranetesError, keeping.prepare(directory, SECONDS))
            patched.restore()
            self.assertEqual((self.loaders(), keeping.uids.lent), ([], set()), name)
            await self.fails(FailedPrecondition, keeping.check(directory))
        await keeping.prepare(directory, SECONDS)
        await self.assert_usable(keeping, directory)

    async def test_what_a_killed_daemon_was_loading_ends_with_the_next_ones_start(self) -> None:
        keeping, _, directory = await self.kept()
        never: Deferred[None] = Deferred()
        loading = self.patch(VmConnections, "load_state", lambda *given, **named: never)
        self.patch(preparer, "unprivileged", lambda command, user, dies_with_parent: command)
        self.patch(WatchedProcess, "kill", kill := _Kill(WatchedProcess.kill))
        preparing = start(keeping.preparer.prepare(directory, self.template, SECONDS))
        preparing.addErrback(lambda failure: None)
        while len(self.loaders()) < 2:
            await sleep(reactor, 0.05)
        [left] = (self.place / "run").iterdir()
        kill.allowed = True
        following = Preparer(reactor, keeping.preparer._settings, self.place / "run", keeping.uids)
        for _ in range(2):
            await following.end_leftovers()
        self.assertEqual(self.loaders(), [])
        self.assertFalse(left.exists())
        loading.restore()
        with contextlib.suppress(Exception):
            preparing.cancel()
            await preparing
        keeping.preparer = following
        await keeping.prepare(directory, SECONDS)


class _Kill:
    """`WatchedProcess.kill`. :ivar allowed: whether it may be called."""

    def __init__(self, kill: Any) -> None:
        self._kill = kill
        self.allowed = False

    def __get__(self, process: Any, kind: type | None = None) -> Any:
        assert self.allowed, "the daemon that was killed ends nothing"
        return lambda: self._kill(process)


def _room_once(disk_usage: Any) -> Any:
    """Return a `disk_usage` that finds much room the first time."""
    calls: list[Path] = []

    def usage(path: Path) -> Any:
        calls.append(path)
        return disk_usage("/") if len(calls) == 1 else disk_usage(path)

    return usage
