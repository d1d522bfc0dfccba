# SPDX-License-Identifier: Apache-2.0
"""The store: a write that was acknowledged is on the disk, and one that failed is not."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import stat
from pathlib import Path
from typing import Any

import attrs
from twisted.internet.defer import gatherResults
from twisted.trial import unittest

from infranetes.machines.pool_record import PoolRecord, PoolState
from infranetes.pods.store import database
from infranetes.pods.store.records import (
    AttachmentRecord,
    ContainerRecord,
    Contents,
    LogPosition,
    SandboxRecord,
)
from infranetes.pods.store.states import ContainerState, SandboxState
from infranetes.pods.store.store import FILE, Store
from infranetes_common import __version__
from infranetes_common.errors import ConfigError, FailedPrecondition, ResourceExhausted, Unavailable
from infranetes_common.reactors import installed


def sandbox(number: int = 1, **changes: Any) -> SandboxRecord:
    record = SandboxRecord(
        id=f"{number:032x}",
        token=f"{number + 1000:032x}",
        state=SandboxState.LAUNCHING,
        name=f"ns/pod{number}/u/0",
        config=b"\x00config",
        runtime_handler="",
        created_at=1_700_000_000_123_456_789,
        provider="qemu",
        kind="docker",
    )
    return attrs.evolve(record, **changes)


def pooled(number: int = 1, **changes: Any) -> PoolRecord:
    record = PoolRecord(
        id=f"{number + 7000:032x}",
        token=f"{number + 8000:032x}",
        state=PoolState.BOOTING,
        provider="qemu",
        handler="",
        cpu_millis=500,
        memory_bytes=2**30,
        created_at=3,
        instance_id=f"vm{number}",
        address="10.0.0.9",
    )
    return attrs.evolve(record, **changes)


def container(number: int = 1, of: int = 1, **changes: Any) -> ContainerRecord:
    record = ContainerRecord(
        id=f"{number + 5000:032x}",
        sandbox_id=f"{of:032x}",
        state=ContainerState.CREATING,
        config=b"\x01",
        image_ref="sha256:1",
        image_id="sha256:1",
        created_at=2,
    )
    return attrs.evolve(record, **changes)


class StoreTests(unittest.TestCase):
    """Real files, a real thread."""

    def setUp(self) -> None:
        self.directory = Path(self.mktemp())
        self.store = Store(installed(), self.directory)

    async def reopened(self) -> Contents:
        await self.store.close()
        self.store = Store(installed(), self.directory)
        contents = await self.store.open()
        self.addCleanup(self.store.close)
        return contents

    def write_and_die(self, writes: int) -> int:
        """Kill a process after so many writes. Return the signal that ended it."""
        child = os.fork()
        if not child:
            try:
                connection = database.open_database(self.directory / FILE)
                for number in range(1, 10_000):
                    database.apply(connection, [database.put("sandboxes", sandbox(number))])
                    if number == writes:
                        os.kill(os.getpid(), 9)
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        return os.WTERMSIG(status)

    async def test_everything_comes_back_as_it_was(self) -> None:
        await self.store.open()
        one = sandbox(claimed=True, instance_id="vm", address="10.0.0.1", agent_host="h", agent_port=7)
        two = container(exit_code=-1, reason="Error", message="words", finished_at=2**62)
        await self.store.put_sandbox(one)
        await self.store.put_container(two)
        await self.store.put_log(two.id, LogPosition("cursor", 7, 2**40, True))
        await self.store.put_setting("pod_cidr", "10.0.0.0/16")
        contents = await self.reopened()
        self.assertEqual(contents.sandboxes, (one,))
        self.assertEqual(contents.containers, (two,))
        self.assertEqual(contents.logs, {two.id: LogPosition("cursor", 7, 2**40, True)})
        self.assertEqual(contents.settings, {"pod_cidr": "10.0.0.0/16"})

    async def test_a_record_replaces_the_one_before_and_keeps_what_hangs_on_it(self) -> None:
        await self.store.open()
        await self.store.put_sandbox(sandbox())
        await self.store.put_container(container())
        await self.store.put_log(container().id, LogPosition("c", 1, 2))
        ready = sandbox().to(SandboxState.READY, address="10.0.0.9")
        await self.store.put_sandbox(ready)
        await self.store.put_container(container().to(ContainerState.CREATED))
        contents = await self.reopened()
        self.assertEqual(contents.sandboxes, (ready,))
        self.assertEqual(contents.containers[0].state, ContainerState.CREATED)
        self.assertEqual(set(contents.logs), {container().id})

    async def test_deleting_a_sandbox_takes_its_containers_and_their_logs(self) -> None:
        await self.store.open()
        await self.store.put_sandbox(sandbox())
        await self.store.put_container(container())
        await self.store.put_log(container().id, LogPosition("c", 1, 2))
        await self.store.delete_sandbox(sandbox().id)
        await self.store.delete_sandbox(sandbox().id)
        self.assertEqual(await self.reopened(), Contents())

    async def test_a_logs_position_without_a_container_is_dropped(self) -> None:
        await self.store.open()
        await self.store.put_log("nobody", LogPosition("c", 1, 2))
        self.assertEqual((await self.reopened()).logs, {})

    async def test_a_write_that_fails_fails_alone(self) -> None:
        await self.store.open()
        good = self.store.put_sandbox(sandbox(1))
        same_name = self.store.put_sandbox(sandbox(2, name=sandbox(1).name))
        also_good = self.store.put_sandbox(sandbox(3))
        await good
        await also_good
        await self.assertFailure(same_name, sqlite3.IntegrityError)
        self.assertEqual(len((await self.reopened()).sandboxes), 2)

    async def test_an_abandoned_sandbox_leaves_its_name_to_the_next(self) -> None:
        await self.store.open()
        await self.store.put_sandbox(sandbox(1).to(SandboxState.ABANDONED))
        await self.store.put_sandbox(sandbox(2, name=sandbox(1).name))
        self.assertEqual(len((await self.reopened()).sandboxes), 2)

    async def test_writes_that_wait_together_are_committed_together(self) -> None:
        commits: list[int] = []
        real = database.apply

        def apply(connection: Any, writes: Any) -> Any:
            commits.append(len(writes))
            return real(connection, writes)

        self.patch(database, "apply", apply)
        await self.store.open()
        await gatherResults([self.store.put_sandbox(sandbox(n)) for n in range(1, 400)])
        self.assertEqual(sum(commits), 399)
        self.assertLess(len(commits), 100)
        self.assertEqual(len((await self.reopened()).sandboxes), 399)

    async def test_a_full_disk_is_said_and_leaves_the_record_as_it_was(self) -> None:
        await self.store.open()
        await self.store.put_sandbox(sandbox())
        real = database.apply

        def small(connection: Any, writes: Any) -> Any:
            pages = connection.execute("PRAGMA page_count").fetchone()[0]
            connection.execute(f"PRAGMA max_page_count = {pages}")
            return real(connection, writes)

        self.patch(database, "apply", small)
        large = attrs.evolve(sandbox(), config=b"x" * 5_000_000)
        await self.assertFailure(self.store.put_sandbox(large), ResourceExhausted)
        self.patch(database, "apply", real)
        self.assertEqual((await self.reopened()).sandboxes, (sandbox(),))

    async def test_nobody_else_can_read_it(self) -> None:
        await self.store.open()
        await self.store.put_sandbox(sandbox())
        file = self.directory / FILE
        self.assertEqual(stat.S_IMODE(file.parent.stat().st_mode), 0o700)
        for each in file.parent.iterdir():
            self.assertEqual(stat.S_IMODE(each.stat().st_mode), 0o600, each)
        await self.store.close()

    async def test_one_that_was_never_opened_says_so(self) -> None:
        await self.store.close()
        await self.assertFailure(self.store.put_sandbox(sandbox()), Unavailable)
        await self.store.open()
        await self.store.put_sandbox(sandbox())
        await self.store.close()

    async def test_a_closed_store_says_so(self) -> None:
        await self.store.open()
        first, second = self.store.close(), self.store.close()
        await first
        await second
        await self.assertFailure(self.store.put_sandbox(sandbox()), Unavailable)

    async def test_what_is_no_store_is_not_touched(self) -> None:
        file = self.directory / FILE
        file.parent.mkdir(parents=True)
        file.write_bytes(b"this is no database" * 100)
        before = file.read_bytes()
        await self.assertFailure(self.store.open(), FailedPrecondition)
        await self.store.close()
        self.assertEqual(file.read_bytes(), before)

    async def test_a_store_of_another_schema_is_not_touched(self) -> None:
        """Neither a later one nor an earlier one is read as far as this release understands it."""
        await self.store.open()
        await self.store.put_sandbox(sandbox())
        await self.store.close()
        file = self.directory / FILE
        for schema in (database.SCHEMA + 1, -1):
            with contextlib.closing(sqlite3.connect(file)) as connection:
                connection.execute(f"PRAGMA user_version = {schema}")
                before = list(connection.iterdump())
            self.store = Store(installed(), self.directory)
            error = await self.assertFailure(self.store.open(), FailedPrecondition)
            self.assertIn(f"{file} has schema {schema}", str(error))
            self.assertIn("install the release that wrote it", str(error))
            await self.store.close()
            with contextlib.closing(sqlite3.connect(file)) as connection:
                self.assertEqual(connection.execute("PRAGMA user_version").fetchone(), (schema,))
                self.assertEqual(list(connection.iterdump()), before)

    def test_the_manual_says_which_schema_a_releases_store_has(self) -> None:
        page = Path(__file__).resolve().parents[4] / "docs" / "operations.md"
        coming = __version__.partition(".dev")[0]
        said = f"the store's schema, which is {database.SCHEMA} in release {coming}."
        self.assertIn(said, " ".join(page.read_text().split()))

    async def test_a_directory_that_is_none_is_named(self) -> None:
        self.directory.write_text("a file")
        error = await self.assertFailure(self.store.open(), ConfigError)
        self.assertIn(str(self.directory), str(error))
        await self.store.close()

    async def test_a_vm_of_the_pool_is_claimed_once_and_never_brought_back(self) -> None:
        await self.store.open()
        idle = pooled(state=PoolState.IDLE)
        await self.store.put_pool(idle)
        claimed = sandbox(id=idle.id, token=idle.token, instance_id=idle.instance_id)
        await self.store.claim(claimed)
        await self.store.update_pool(attrs.evolve(idle, certificate_until=5))
        other = attrs.evolve(claimed, name="ns/other/u/0")
        await self.assertFailure(self.store.claim(other), FailedPrecondition)
        contents = await self.reopened()
        self.assertEqual((contents.sandboxes, contents.pool), ((claimed,), ()))

    async def test_only_an_idle_vm_of_the_pool_is_claimed(self) -> None:
        await self.store.open()
        for number, state in enumerate((PoolState.BOOTING, PoolState.ENDING), start=1):
            record = pooled(number, state=state)
            await self.store.put_pool(record)
            claimed = sandbox(number, id=record.id, token=record.token, instance_id=record.instance_id)
            await self.assertFailure(self.store.claim(claimed), FailedPrecondition)
        contents = await self.reopened()
        self.assertEqual((contents.sandboxes, len(contents.pool)), ((), 2))

    async def test_a_claim_whose_name_is_taken_leaves_the_vm_in_the_pool(self) -> None:
        await self.store.open()
        idle = pooled(state=PoolState.IDLE)
        await self.store.put_pool(idle)
        await self.store.put_sandbox(sandbox(7, name="ns/web/u/0"))
        claimed = sandbox(id=idle.id, token=idle.token, instance_id=idle.instance_id, name="ns/web/u/0")
        await self.assertFailure(self.store.claim(claimed), sqlite3.IntegrityError)
        self.assertEqual((await self.reopened()).pool, (idle,))

    async def test_an_attached_volume_is_recorded_beyond_the_end_of_its_sandbox(self) -> None:
        await self.store.open()
        await self.store.put_sandbox(sandbox())
        record = AttachmentRecord("pvc-1", "qemu", sandbox().id, "qemu-1")
        attached = attrs.evolve(record, serial="0" * 20)
        for each in (record, attached):
            await self.store.put_attachment(each)
            self.assertEqual((await self.reopened()).attachments, (each,))
        await self.store.delete_sandbox(sandbox().id)
        self.assertEqual((await self.reopened()).attachments, (attached,))
        for _ in range(2):
            await self.store.delete_attachment("pvc-1")
        self.assertEqual((await self.reopened()).attachments, ())

    async def test_a_killed_writer_leaves_whole_records(self) -> None:
        """Writes that were acknowledged survive SIGKILL; others are complete or absent."""
        self.assertEqual(self.write_and_die(50), 9)
        contents = await self.store.open()
        self.assertEqual(len(contents.sandboxes), 50)
        await self.store.close()
