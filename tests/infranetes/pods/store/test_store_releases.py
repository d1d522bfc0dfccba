# SPDX-License-Identifier: Apache-2.0
"""Stores written by releases: `stores/RELEASE.json` is a dump of a store of that release's own daemon."""

from __future__ import annotations

import contextlib
import json
import re
import sqlite3
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from infranetes.machines.pool_record import PoolState
from infranetes.pods.store import database
from infranetes.pods.store.states import ContainerState, SandboxState
from infranetes_common import __version__

STORES = Path(__file__).parent / "stores"
PAGE = Path(__file__).resolve().parents[4] / "docs" / "operations.md"


def schema(connection: sqlite3.Connection) -> set[tuple[str, str]]:
    """Return the tables and indexes."""
    made = connection.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL")
    return {(name, " ".join(sql.split())) for name, sql in made}


class ReleasedStoreTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.path = Path(self.mktemp()) / "store" / "infranetes.sqlite"
        self.path.parent.mkdir(parents=True)

    def recorded(self, release: str) -> int:
        """Write that release's store to `path`. Return the number of its schema."""
        content = json.loads((STORES / f"{release}.json").read_text())
        with contextlib.closing(sqlite3.connect(self.path, isolation_level=None)) as connection:
            connection.executescript("\n".join(content["statements"]))
            connection.execute(f"PRAGMA user_version = {content['schema']}")
        return int(content["schema"])

    def test_what_0_1_0_wrote_is_read_to_the_last_word(self) -> None:
        self.recorded("0.1.0")
        with contextlib.closing(database.open_database(self.path)) as connection:
            contents = database.load(connection)
        sandboxes = {each.name: each for each in contents.sandboxes}
        pod, stopped = sandboxes["default/web/uid-web/0"], sandboxes["default/stopped/uid-stopped/0"]
        self.assertEqual((pod.state, stopped.state), (SandboxState.READY, SandboxState.STOPPED))
        self.assertEqual(
            (pod.provider, pod.instance_id, pod.claimed), ("simulated", f"sim-{pod.token}", True)
        )
        ended, main = sorted(contents.containers, key=lambda each: each.state.value)
        self.assertEqual((ended.state, ended.exit_code, ended.reason), (ContainerState.EXITED, 3, "Error"))
        self.assertEqual((main.state, main.sandbox_id), (ContainerState.RUNNING, pod.id))
        self.assertEqual(
            {name: each.done for name, each in contents.logs.items()}, {main.id: False, ended.id: True}
        )
        (idle,) = contents.pool
        self.assertEqual((idle.state, idle.address), (PoolState.IDLE, "10.89.0.4"))

    def test_a_released_migration_never_changes(self) -> None:
        for file in STORES.glob("*.json"):
            number = self.recorded(file.stem)
            self.patch(database, "MIGRATIONS", database.MIGRATIONS[:number])
            with (
                contextlib.closing(sqlite3.connect(self.path)) as then,
                contextlib.closing(database.open_database(self.path.with_name("new"))) as now,
            ):
                self.assertEqual(schema(then), schema(now), file.stem)
            self.path.unlink()

    def test_the_manual_says_which_releases_can_follow_each_other_backwards(self) -> None:
        rows = dict(re.findall(r"^\| ([\d.]+) \| (\d+) \|$", PAGE.read_text(), flags=re.M))
        self.assertEqual(rows[__version__], str(len(database.MIGRATIONS)))
        for file in STORES.glob("*.json"):
            self.assertEqual(rows[file.stem], str(self.recorded(file.stem)))
            self.path.unlink()
