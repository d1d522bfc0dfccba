# SPDX-License-Identifier: Apache-2.0
"""The contract of providers whose kept VMs start again as others, which also makes each call twice."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

from twisted.internet.defer import CancelledError, gatherResults
from zope.interface.verify import verifyObject

from infranetes.providers.keeping import IStartsKeptVms
from infranetes_common.concurrency import start
from infranetes_common.errors import FailedPrecondition
from tests.contract.kept_vms import SECONDS, KeptVmsContract
from tests.harness.durations import slow


class StartedKeptVmsContract(KeptVmsContract):
    """The promises of `IStartsKeptVms`, and those of what keeps VMs."""

    # Hooks.

    async def keeper(self) -> IStartsKeptVms:
        raise NotImplementedError

    async def next_daemon(self, keeper: IStartsKeptVms) -> IStartsKeptVms:
        raise NotImplementedError

    async def launched(self, keeper: IStartsKeptVms, directory: Path) -> str:
        """Start a VM from a directory, and wait until it runs; return its id. Fails as `launch` does."""
        raise NotImplementedError

    async def assert_executes(self, keeper: IStartsKeptVms, machine: str) -> None:
        """Assert that a VM executes which has been started from a directory."""
        raise NotImplementedError

    # Helpers.

    async def kept_in(self, keeper: IStartsKeptVms, machine: str = "") -> Path:
        """Keep a VM, a new one by default; return the directory."""
        directory = self.directory()
        await keeper.keep(machine or await self.machine(keeper), directory, SECONDS)
        return directory

    async def prepared_in(self, keeper: IStartsKeptVms, machine: str = "") -> Path:
        """Likewise, and prepare it."""
        directory = await self.kept_in(keeper, machine)
        await keeper.prepare(directory, SECONDS)
        return directory

    async def assert_refused(self, keeper: IStartsKeptVms, directory: Path) -> None:
        """Assert that nothing starts from a directory."""
        for _ in range(2):
            await self.fails(FailedPrecondition, keeper.check(directory))
            await self.fails(FailedPrecondition, self.launched(keeper, directory))

    # The promises.

    async def test_it_starts_kept_vms(self) -> None:
        verifyObject(IStartsKeptVms, await self.keeper())

    async def test_vms_start_from_a_kept_one_which_goes_on(self) -> None:
        keeper = await self.keeper()
        machine, directory = await self.machine(keeper), self.directory()
        await keeper.keep(machine, directory, SECONDS)
        for _ in range(2):
            await keeper.prepare(directory, SECONDS)
            await keeper.check(directory)
        for each in directory.iterdir():
            self.assertEqual(stat.S_IMODE(each.stat().st_mode) & 0o077, 0, each)
        machines = [await self.launched(keeper, directory)]
        machines += await gatherResults([start(self.launched(keeper, directory)) for _ in range(2)])
        self.assertEqual(len({machine, *machines}), 4)
        for clone in machines:
            await self.assert_executes(keeper, clone)
        await self.assert_unchanged(keeper, machine)
        await keeper.prepare(directory, SECONDS)
        await keeper.check(directory)

    async def test_the_state_outlives_its_vm_and_the_daemon(self) -> None:
        keeper = await self.keeper()
        machine, directory = await self.machine(keeper), self.directory()
        await keeper.keep(machine, directory, SECONDS)
        await self.end(keeper, machine)
        keeper = await self.next_daemon(keeper)
        await keeper.prepare(directory, SECONDS)
        keeper = await self.next_daemon(keeper)
        await keeper.check(directory)
        await self.assert_executes(keeper, await self.launched(keeper, directory))

    async def test_vms_go_on_without_the_state(self) -> None:
        keeper = await self.keeper()
        directory = await self.prepared_in(keeper)
        one, other = [await self.launched(keeper, directory) for _ in range(2)]
        shutil.rmtree(directory)
        await self.assert_executes(keeper, one)
        await self.assert_refused(keeper, directory)
        keeper = await self.next_daemon(keeper)
        await self.end(keeper, one)
        await self.assert_executes(keeper, other)

    async def test_nothing_starts_from_what_was_not_prepared(self) -> None:
        keeper = await self.keeper()
        directory, empty = await self.kept_in(keeper), self.directory()
        for each in (directory, empty, empty / "missing"):
            await self.assert_refused(keeper, each)
        for each in (empty, empty / "missing"):
            for _ in range(2):
                await self.fails(FailedPrecondition, keeper.prepare(each, SECONDS))
        self.assertEqual(list(empty.iterdir()), [])

    @slow(60, "a VM is kept for each file that is changed")
    async def test_a_state_whose_files_were_changed_is_refused(self) -> None:
        keeper = await self.keeper()
        machine = await self.machine(keeper)
        names = [each.name for each in (await self.prepared_in(keeper, machine)).iterdir()]
        for name in names:
            for change in (_write_into, _cut, Path.unlink):
                directory = await self.prepared_in(keeper, machine)
                change(directory / name)
                await self.assert_refused(keeper, directory)

    async def test_a_preparation_that_is_cancelled_can_be_made_again(self) -> None:
        keeper = await self.keeper()
        directory = await self.kept_in(keeper)
        for _ in range(2):
            preparing = keeper.prepare(directory, SECONDS)
            preparing.addErrback(lambda failure: failure.trap(CancelledError))
            preparing.cancel()
            await preparing
        await keeper.prepare(directory, SECONDS)
        await self.assert_executes(keeper, await self.launched(keeper, directory))


def _write_into(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.write(b"\xff" * min(64, file.stat().st_size))


def _cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)
