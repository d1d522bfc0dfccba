# SPDX-License-Identifier: Apache-2.0
"""Stores without a thread or a disk."""

from __future__ import annotations

import sqlite3
from functools import cache

from twisted.internet.defer import Deferred, fail, succeed

from infranetes.pods.store import database
from infranetes.pods.store.records import Contents
from infranetes.pods.store.store import Store
from tests.infranetes.pods.scheduling import Kind


class InlineStore(Store):
    """The store without its thread, over a database in memory. :ivar failing: every write fails with this."""

    def __init__(self) -> None:
        self.connection = sqlite3.connect(":memory:", isolation_level=None)
        _empty_store().backup(self.connection)
        self.connection.execute("PRAGMA foreign_keys = ON")
        self.failing: Exception | None = None
        self.writes = 0
        self.scheduler = Kind()

    def contents(self) -> Contents:
        return database.load(self.connection)

    def _write(self, write: database.Write) -> Deferred[None]:
        return self.scheduler.write(lambda: self._apply(write))

    def _apply(self, write: database.Write) -> Deferred[None]:
        if self.failing is not None:
            return fail(self.failing)
        self.writes += 1
        (result,) = database.apply(self.connection, [write])
        return fail(result) if isinstance(result, Exception) else succeed(None)


@cache
def _empty_store() -> sqlite3.Connection:
    """Return a store's database without records, to be copied."""
    connection = sqlite3.connect(":memory:", isolation_level=None)
    database.make_tables(connection)
    return connection


class DeadStore(Store):
    """The store of a killed daemon: it writes nothing, and never answers."""

    def __init__(self) -> None:
        pass

    def _write(self, write: database.Write) -> Deferred[None]:
        return Deferred()
