# SPDX-License-Identifier: Apache-2.0
"""Processes are put below pods' slices, by a real systemd."""

from __future__ import annotations

from twisted.internet.defer import gatherResults
from twisted.internet.threads import deferToThread

from infranetes_common.concurrency import start
from infranetes_common.errors import InvalidArgument, Unavailable
from infranetes_common.reactors import installed
from tests.infranetes.providers.qemu.cgroups.case import ScopeCase, kill, refused

reactor = installed()


class ScopeTests(ScopeCase):
    """Scopes below pods' slices."""

    async def test_a_process_is_below_its_pods_slice(self) -> None:
        pid = await deferToThread(self.inside)
        for _ in range(2):
            await self.scopes.place(pid, self.slice, self.name, "the VM of pod a/b")
            self.assert_placed(pid)
        (path,) = await (await self.bus()).manager("GetUnit", "s", (f"{self.name}.scope",))
        unit = await (await self.bus()).properties(path, "Unit")
        self.assertEqual(unit["Description"], "the VM of pod a/b")
        kill(self.outside[pid])
        await self.scopes.forget(self.slice, self.name)

    async def test_its_processors_are_a_property_of_its_scope(self) -> None:
        """Of version 2 systemd then enables the controller for the slices above."""
        pid = await deferToThread(self.inside)
        await self.scopes.place(pid, self.slice, self.name)
        await self.scopes.set(self.name, {"AllowedCPUs": ("ay", [5]), "AllowedMemoryNodes": ("ay", [1])})
        (path,) = await (await self.bus()).manager("GetUnit", "s", (f"{self.name}.scope",))
        unit = await (await self.bus()).properties(path, "Scope")
        masks = [bytes(unit[name]).rstrip(b"\0") for name in ("AllowedCPUs", "AllowedMemoryNodes")]
        self.assertEqual(masks, [b"\5", b"\1"])
        error = await refused(Unavailable, self.scopes.set("none", {"AllowedCPUs": ("ay", [1])}))
        self.assertIn("none.scope", error)

    async def test_systemd_reads_its_units_again_meanwhile(self) -> None:
        pid = await deferToThread(self.inside)
        bus = await self.bus()
        placing = start(self.scopes.place(pid, self.slice, self.name))
        reloading = start(bus.manager("Reload"))
        await placing
        await reloading
        self.assert_placed(pid)
        await bus.manager("Reload")
        self.assert_placed(pid)

    async def test_several_are_placed_at_once(self) -> None:
        pids = [await deferToThread(self.inside) for _ in range(4)]
        name = self.name[:-1]
        await gatherResults(
            [start(self.scopes.place(pid, self.slice, f"{name}{at}")) for at, pid in enumerate(pids)]
        )
        for at, pid in enumerate(pids):
            self.name = f"{name}{at}"
            self.assert_placed(pid)

    async def test_one_that_has_ended_is_told(self) -> None:
        pid = await deferToThread(self.inside)
        kill(self.outside[pid])
        error = await refused(Unavailable, self.scopes.place(pid, self.slice, self.name))
        self.assertIn("has ended", error)

    async def test_one_that_systemd_does_not_know_is_told(self) -> None:
        process = self.sleeping()
        self.outside[4_000_000] = process.pid
        error = await refused(Unavailable, self.scopes.place(4_000_000, self.slice, self.name))
        self.assertIn(self.slice.rpartition("/")[2], error)

    async def test_a_scope_of_the_name_with_other_processes_is_not_taken_over(self) -> None:
        first, second = await deferToThread(self.inside), await deferToThread(self.inside)
        await self.scopes.place(first, self.slice, self.name)
        error = await refused(Unavailable, self.scopes.place(second, self.slice, self.name))
        self.assertIn("already", error)
        self.assert_placed(first)

    async def test_what_is_no_slice_is_refused(self) -> None:
        pid = await deferToThread(self.inside)
        await refused(InvalidArgument, self.scopes.place(pid, "/../x.slice/..", self.name))
        await refused(Unavailable, self.scopes.place(pid, "/a--b.slice", self.name))
