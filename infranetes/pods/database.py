"""The store's file: its schema, and how records become rows. Synchronous; `store.Store` gives it a thread.

SQLite in WAL mode with synchronous=FULL: a commit is on the disk before it is answered. A cloud's VM
outlives a node that loses power, so a record that had only reached the page cache would be a VM
without a record. Group commits make many writes share one fsync, which is what keeps that cheap.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs

from infranetes.pods.records import ContainerRecord, Contents, LogPosition, PoolRecord, SandboxRecord
from infranetes.pods.states import ContainerState, PoolState, SandboxState
from infranetes_common.errors import ConfigError, FailedPrecondition, ResourceExhausted, Unavailable

MIGRATIONS: tuple[str, ...] = (
    # 1
    """
    CREATE TABLE sandboxes (
        id TEXT PRIMARY KEY, token TEXT NOT NULL UNIQUE, state TEXT NOT NULL, name TEXT NOT NULL,
        config BLOB NOT NULL, runtime_handler TEXT NOT NULL, created_at INTEGER NOT NULL,
        claimed INTEGER NOT NULL, stopped_at INTEGER NOT NULL, instance_id TEXT NOT NULL,
        address TEXT NOT NULL, agent_host TEXT NOT NULL, agent_port INTEGER NOT NULL, message TEXT NOT NULL
    ) STRICT, WITHOUT ROWID;
    CREATE UNIQUE INDEX live_names ON sandboxes (name) WHERE state != 'abandoned';
    CREATE TABLE containers (
        id TEXT PRIMARY KEY, sandbox_id TEXT NOT NULL REFERENCES sandboxes (id) ON DELETE CASCADE,
        state TEXT NOT NULL, config BLOB NOT NULL, image_ref TEXT NOT NULL, image_id TEXT NOT NULL,
        created_at INTEGER NOT NULL, claimed INTEGER NOT NULL, started_at INTEGER NOT NULL,
        finished_at INTEGER NOT NULL, exit_code INTEGER NOT NULL, reason TEXT NOT NULL, message TEXT NOT NULL
    ) STRICT, WITHOUT ROWID;
    CREATE INDEX containers_of_sandbox ON containers (sandbox_id);
    CREATE TABLE logs (
        container_id TEXT PRIMARY KEY REFERENCES containers (id) ON DELETE CASCADE,
        cursor TEXT NOT NULL, inode INTEGER NOT NULL, size INTEGER NOT NULL, done INTEGER NOT NULL
    ) STRICT, WITHOUT ROWID;
    CREATE TABLE settings (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT, WITHOUT ROWID;
    """,
    # 2: certificates that are replaced; the pool
    """
    ALTER TABLE sandboxes ADD COLUMN certificate_until INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE sandboxes ADD COLUMN certificate_key TEXT NOT NULL DEFAULT '';
    CREATE TABLE pool (
        id TEXT PRIMARY KEY, token TEXT NOT NULL UNIQUE, state TEXT NOT NULL, cpu_millis INTEGER NOT NULL,
        memory_bytes INTEGER NOT NULL, created_at INTEGER NOT NULL, instance_id TEXT NOT NULL,
        address TEXT NOT NULL, agent_host TEXT NOT NULL, agent_port INTEGER NOT NULL, message TEXT NOT NULL,
        certificate_until INTEGER NOT NULL, certificate_key TEXT NOT NULL
    ) STRICT, WITHOUT ROWID;
    """,
    # 3: pods whose image is the VM
    """
    ALTER TABLE sandboxes ADD COLUMN image TEXT NOT NULL DEFAULT '';
    """,
)
"""Each brings the schema from its index to the next version. One that was released never changes."""

Write = Callable[[sqlite3.Connection], Any]

_SANDBOX_COLUMNS = tuple(field.name for field in attrs.fields(SandboxRecord))
_CONTAINER_COLUMNS = tuple(field.name for field in attrs.fields(ContainerRecord))
_POOL_COLUMNS = tuple(field.name for field in attrs.fields(PoolRecord))
_COLUMNS: dict[type, tuple[str, ...]] = {
    SandboxRecord: _SANDBOX_COLUMNS,
    ContainerRecord: _CONTAINER_COLUMNS,
    PoolRecord: _POOL_COLUMNS,
}


def open_database(path: Path) -> sqlite3.Connection:
    """The store's file, made or brought to the present schema.

    :raise ConfigError: the directory can't be written.
    :raise FailedPrecondition: not a store, or one of a newer release.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.parent.chmod(0o700)
        # SQLite gives its -wal and -shm the permissions of the file itself.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        path.chmod(0o600)
    except OSError as error:
        raise ConfigError(f"state_dir: the store can't be kept in {path.parent}: {error.strerror}") from None
    try:
        connection = sqlite3.connect(path, isolation_level=None, timeout=10)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")
        _migrate(connection, path)
    except sqlite3.Error as error:
        raise FailedPrecondition(
            f"the store {path} can't be opened: {error}. Put it back from a copy, or move it away to begin "
            "anew: VMs that run now are then ended"
        ) from None
    return connection


def _migrate(connection: sqlite3.Connection, path: Path) -> None:
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version > len(MIGRATIONS):
        raise FailedPrecondition(
            f"the store {path} has schema {version}, this release knows up to {len(MIGRATIONS)}: "
            "install the newer release again"
        )
    for number, script in enumerate(MIGRATIONS[version:], start=version + 1):
        connection.executescript(f"BEGIN IMMEDIATE; {script} PRAGMA user_version = {number}; COMMIT;")


def apply(connection: sqlite3.Connection, writes: Sequence[Write]) -> list[Any]:
    """Do all of `writes` in one commit: each one's result, or the Exception with which it alone failed.

    :raise InfranetesError: the commit failed, so nothing of any of them is done.
    """
    results: list[Any] = []
    try:
        connection.execute("BEGIN IMMEDIATE")
        for write in writes:
            connection.execute("SAVEPOINT one")
            try:
                results.append(write(connection))
                connection.execute("RELEASE one")
            except Exception as error:
                if not connection.in_transaction:  # a full disk ends the transaction as a whole
                    raise
                connection.execute("ROLLBACK TO one")
                connection.execute("RELEASE one")
                results.append(as_error(error))
        connection.execute("COMMIT")
    except Exception as error:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise as_error(error) from error
    return results


def as_error(error: Exception) -> Exception:
    """What a failed write means to the caller."""
    if isinstance(error, sqlite3.OperationalError) and "full" in str(error):
        return ResourceExhausted("the disk of the state directory is full: make room and try again")
    if isinstance(error, sqlite3.OperationalError):
        return Unavailable(f"the store can't be written: {error}; the state directory's disk may be at fault")
    return error


def load(connection: sqlite3.Connection) -> Contents:
    """Everything there is."""
    sandboxes = connection.execute(f"SELECT {', '.join(_SANDBOX_COLUMNS)} FROM sandboxes")  # noqa: S608
    containers = connection.execute(
        f"SELECT {', '.join(_CONTAINER_COLUMNS)} FROM containers"  # noqa: S608
    )
    pool = connection.execute(f"SELECT {', '.join(_POOL_COLUMNS)} FROM pool")  # noqa: S608
    logs = connection.execute("SELECT container_id, cursor, inode, size, done FROM logs")
    return Contents(
        sandboxes=tuple(_record(SandboxRecord, SandboxState, _SANDBOX_COLUMNS, row) for row in sandboxes),
        containers=tuple(
            _record(ContainerRecord, ContainerState, _CONTAINER_COLUMNS, row) for row in containers
        ),
        pool=tuple(_record(PoolRecord, PoolState, _POOL_COLUMNS, row) for row in pool),
        logs={row[0]: LogPosition(row[1], row[2], row[3], bool(row[4])) for row in logs},
        settings=dict(connection.execute("SELECT name, value FROM settings").fetchall()),
    )


def _record(kind: Any, states: Any, columns: tuple[str, ...], row: tuple[Any, ...]) -> Any:
    fields = dict(zip(columns, row, strict=True))
    fields["state"] = states(fields["state"])
    if "claimed" in fields:
        fields["claimed"] = bool(fields["claimed"])
    return kind(**fields)


def put(table: str, record: SandboxRecord | ContainerRecord | PoolRecord) -> Write:
    """Insert the record, or replace the one with its id."""
    columns = _COLUMNS[type(record)]
    values = [getattr(record, name) for name in columns]
    values[columns.index("state")] = record.state.value
    if not isinstance(record, PoolRecord):
        values[columns.index("claimed")] = int(record.claimed)
    marks = ", ".join("?" * len(columns))
    updates = ", ".join(f"{name} = excluded.{name}" for name in columns if name != "id")
    # Not REPLACE, which deletes first and so would take the record's children with it.
    sql = (
        f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({marks}) "  # noqa: S608 - names are ours
        f"ON CONFLICT (id) DO UPDATE SET {updates}"
    )
    return lambda connection: connection.execute(sql, values) and None


def delete(table: str, id: str) -> Write:
    """Delete one record, and what hangs on it."""
    return lambda connection: connection.execute(f"DELETE FROM {table} WHERE id = ?", (id,)) and None  # noqa: S608


def update_pool(record: PoolRecord) -> Write:
    """Keep the record if there is one with its id: never bring back what was claimed or has ended."""
    names = [name for name in _POOL_COLUMNS if name != "id"]
    values = [record.state.value if name == "state" else getattr(record, name) for name in names]
    sql = f"UPDATE pool SET {', '.join(f'{name} = ?' for name in names)} WHERE id = ?"  # noqa: S608
    return lambda connection: connection.execute(sql, (*values, record.id)) and None


def claim(record: SandboxRecord) -> Write:
    """Make the pool's VM of that id the sandbox's.

    :raise FailedPrecondition: from the write: the pool has no idle VM with that id, token and instance."""
    insert = put("sandboxes", record)

    def write(connection: sqlite3.Connection) -> None:
        taken = connection.execute(
            "DELETE FROM pool WHERE id = ? AND token = ? AND instance_id = ? AND state = ?",
            (record.id, record.token, record.instance_id, PoolState.IDLE.value),
        )
        if taken.rowcount != 1:
            raise FailedPrecondition(f"the pool has no idle VM {record.instance_id}: it was claimed before")
        insert(connection)

    return write


def put_log(container_id: str, position: LogPosition) -> Write:
    """Keep a log's position, as long as its container has a record."""
    row = (container_id, position.cursor, position.inode, position.size, int(position.done), container_id)
    return lambda connection: (
        connection.execute(
            "INSERT INTO logs (container_id, cursor, inode, size, done) SELECT ?, ?, ?, ?, ? "
            "WHERE EXISTS (SELECT 1 FROM containers WHERE id = ?) ON CONFLICT (container_id) DO UPDATE SET "
            "cursor = excluded.cursor, inode = excluded.inode, size = excluded.size, done = excluded.done",
            row,
        )
        and None
    )


def put_setting(name: str, value: str) -> Write:
    """Keep one setting."""
    return lambda connection: (
        connection.execute(
            "INSERT INTO settings (name, value) VALUES (?, ?) "
            "ON CONFLICT (name) DO UPDATE SET value = excluded.value",
            (name, value),
        )
        and None
    )
