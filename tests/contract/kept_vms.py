# SPDX-License-Identifier: Apache-2.0
"""The contract of everything that keeps VMs as they run: one suite, which also makes each call twice.

The test module of an implementation has, for instance::

    class KeptVmsTests(KeptVmsContract, TestCase):
        async def keeper(self): ...
        async def machine(self, keeper): ...
"""

from __future__ import annotations

import stat
import tempfile
from pathlib import Path

from twisted.internet.defer import CancelledError
from zope.interface.verify import verifyObject

from infranetes.providers.keeping import IKeepsVms, KeptVm
from infranetes_common.errors import DeadlineExceeded, NotFound, Unavailable
from tests.support.failures import FailureAssertions

SECONDS = 120.0


class KeptVmsContract(FailureAssertions):
    """The promises of `IKeepsVms`."""

    # Hooks.

    async def keeper(self) -> IKeepsVms:
        """Return the implementation under test, which knows no VM yet."""
        raise NotImplementedError

    async def machine(self, keeper: IKeepsVms) -> str:
        """Make a running VM; return its id."""
        raise NotImplementedError

    async def next_daemon(self, keeper: IKeepsVms) -> IKeepsVms:
        """Replace the daemon by the next one, which finds the VMs."""
        raise NotImplementedError

    async def end(self, keeper: IKeepsVms, machine: str) -> None:
        """Make a VM end by itself, and wait until that is noticed."""
        raise NotImplementedError

    async def assert_unchanged(self, keeper: IKeepsVms, machine: str) -> None:
        """Assert that a VM executes, with what it had when it was made, and that nothing else is left."""
        raise NotImplementedError

    # Helpers.

    def directory(self) -> Path:
        """Return an empty directory."""
        return Path(tempfile.mkdtemp(dir=self._base()))

    def _base(self) -> Path:
        base = Path(self.mktemp()).absolute()
        base.mkdir(parents=True)
        return base

    def assert_kept(self, kept: KeptVm, directory: Path) -> None:
        self.assertEqual({each.name: each.stat().st_size for each in directory.iterdir()}, dict(kept.files))
        self.assertTrue(all(kept.files.values()), kept)
        for each in directory.iterdir():
            self.assertEqual(stat.S_IMODE(each.stat().st_mode), 0o600, each)
        self.assertGreater(kept.taken_at, 0)
        self.assertGreater(kept.pause_seconds, 0)
        self.assertGreaterEqual(kept.seconds, kept.pause_seconds)
        self.assertTrue(all(kept.machine.values()), kept.machine)

    # The promises.

    async def test_it_provides_the_interface(self) -> None:
        verifyObject(IKeepsVms, await self.keeper())

    async def test_machines_that_nobody_has_are_unknown(self) -> None:
        keeper = await self.keeper()
        for machine in ("qemu-" + "0" * 32, "", "../../etc", "ü" * 300):
            for _ in range(2):
                await self.fails(NotFound, keeper.keep(machine, self.directory(), SECONDS))

    async def test_a_vm_is_kept_as_often_as_one_likes_and_goes_on(self) -> None:
        keeper = await self.keeper()
        machine = await self.machine(keeper)
        for _ in range(3):
            directory = self.directory()
            self.assert_kept(await keeper.keep(machine, directory, SECONDS), directory)
            await self.assert_unchanged(keeper, machine)
        keeper = await self.next_daemon(keeper)
        directory = self.directory()
        self.assert_kept(await keeper.keep(machine, directory, SECONDS), directory)
        await self.assert_unchanged(keeper, machine)

    async def test_calls_at_the_same_time_are_served_one_after_the_other(self) -> None:
        keeper = await self.keeper()
        machine = await self.machine(keeper)
        directories = [self.directory() for _ in range(3)]
        calls = [keeper.keep(machine, directory, SECONDS) for directory in directories]
        kept = [await call for call in calls]
        for one, directory in zip(kept, directories, strict=True):
            self.assert_kept(one, directory)
        self.assertEqual(kept, sorted(kept, key=lambda one: one.taken_at))
        await self.assert_unchanged(keeper, machine)

    async def test_one_that_is_cancelled_or_takes_too_long_leaves_the_vm_as_it_was(self) -> None:
        keeper = await self.keeper()
        machine = await self.machine(keeper)
        for _ in range(2):
            keeping = keeper.keep(machine, self.directory(), SECONDS)
            keeping.cancel()
            await self.assertFailure(keeping, CancelledError)
            await self.fails(DeadlineExceeded, keeper.keep(machine, self.directory(), 0.02))
            await self.assert_unchanged(keeper, machine)
        directory = self.directory()
        self.assert_kept(await keeper.keep(machine, directory, SECONDS), directory)

    async def test_a_vm_that_has_ended_is_not_kept_and_others_are(self) -> None:
        keeper = await self.keeper()
        one, other = [await self.machine(keeper) for _ in range(2)]
        keeping = keeper.keep(one, self.directory(), SECONDS)
        keeping.addErrback(lambda failure: failure.trap(Unavailable))
        await self.end(keeper, one)
        await keeping
        for _ in range(2):
            await self.fails(Unavailable, keeper.keep(one, self.directory(), SECONDS))
        directory = self.directory()
        self.assert_kept(await keeper.keep(other, directory, SECONDS), directory)
        await self.assert_unchanged(keeper, other)
