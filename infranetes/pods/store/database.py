# SPDX-License-Identifier: Apache-2.0
"""The store's file: its schema, and the rows of its records. Blocks; `store.Store` runs it in a thread.

SQLite is in WAL mode with synchronous=FULL: a commit is on the disk before it is reported as done. A cloud's
VM outlives a node that loses power, and would have no record if that had only reached the page cache. Group
commits keep this cheap: many writes share one fsync.

Pods must be removable even when the disk is full, since removing them makes room. So opening the store
reserves room for that in the file and in its log, which are overwritten in place from then on.
"""

from __future__ import annotations

import enum
import os
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import attrs

from infranetes.machines.pool_record import PoolRecord, PoolState
from infranetes.pods.store.records import (
    AttachmentRecord,
    ContainerRecord,
    Contents,
    LogPosition,
    SandboxRecord,
)
from infranetes.pods.store.states import ContainerState, SandboxState
from infranetes_common.errors import ConfigError, FailedPrecondition, ResourceExhausted, Unavailable

SCHEMA = 1  # the number of `_TABLES`, which a store has as its user_version; 0: it has no tables yet

_TABLES = """
    CREATE TABLE sandboxes (
        id TEXT PRIMARY KEY, token TEXT NOT NULL UNIQUE, state TEXT NOT NULL, name TEXT NOT NULL,
        config BLOB NOT NULL, runtime_handler TEXT NOT NULL, created_at INTEGER NOT NULL,
        provider TEXT NOT NULL, kind TEXT NOT NULL, network TEXT NOT NULL, claimed INTEGER NOT NULL,
        instance_id TEXT NOT NULL, address TEXT NOT NULL, more_addresses TEXT NOT NULL,
        agent_host TEXT NOT NULL, agent_port INTEGER NOT NULL, certificate_until INTEGER NOT NULL,
        certificate_key TEXT NOT NULL, image TEXT NOT NULL, cpu_millis INTEGER NOT NULL,
        memory_bytes INTEGER NOT NULL, shadow_id TEXT NOT NULL, message TEXT NOT NULL
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
    CREATE TABLE pool (
        id TEXT PRIMARY KEY, token TEXT NOT NULL UNIQUE, state TEXT NOT NULL, provider TEXT NOT NULL,
        handler TEXT NOT NULL, cpu_millis INTEGER NOT NULL, memory_bytes INTEGER NOT NULL,
        created_at INTEGER NOT NULL, instance_id TEXT NOT NULL, address TEXT NOT NULL,
        agent_host TEXT NOT NULL, agent_port INTEGER NOT NULL, certificate_until INTEGER NOT NULL,
        certificate_key TEXT NOT NULL, message TEXT NOT NULL
    ) STRICT, WITHOUT ROWID;
    CREATE TABLE attachments (
        id TEXT PRIMARY KEY, provider TEXT NOT NULL, sandbox_id TEXT NOT NULL, instance_id TEXT NOT NULL,
        serial TEXT NOT NULL
    ) STRICT, WITHOUT ROWID;
    CREATE TABLE settings (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT, WITHOUT ROWID;
"""

_CHECKPOINT_PAGES = 256  # pages of the write-ahead log, after which it is reused from its start
_RESERVE_BYTES = 2 * _CHECKPOINT_PAGES * 4096  # kept free in the file, and written once to the log

Write = Callable[[sqlite3.Connection], None]
"""A change to the store, done in a transaction of `apply`."""

_Value = str | int | bytes
_Record = TypeVar("_Record", SandboxRecord, ContainerRecord, PoolRecord)

_SANDBOX_COLUMNS = tuple(field.name for field in attrs.fields(SandboxRecord))
_CONTAINER_COLUMNS = tuple(field.name for field in attrs.fields(ContainerRecord))
_POOL_COLUMNS = tuple(field.name for field in attrs.fields(PoolRecord))
_ATTACHMENT_COLUMNS = tuple(field.name for field in attrs.fields(AttachmentRecord))
_COLUMNS: dict[type, tuple[str, ...]] = {
    SandboxRecord: _SANDBOX_COLUMNS,
    ContainerRecord: _CONTAINER_COLUMNS,
    PoolRecord: _POOL_COLUMNS,
}


def open_database(path: Path) -> sqlite3.Connection:
    """Open the store's file, creating it if necessary.

    :raise ConfigError: the directory can't be written.
    :raise FailedPrecondition: the file is not a store, or is one of another release's schema.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.parent.chmod(0o700)
        # SQLite gives the -wal and -shm files the permissions of the database file.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        path.chmod(0o600)
    except OSError as error:
        raise ConfigError(f"state_dir: the store can't be kept in {path.parent}: {error.strerror}") from None
    try:
        connection = sqlite3.connect(path, isolation_level=None, timeout=10)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")
        _check_or_make_tables(connection, path)
        _reserve(connection)
    except sqlite3.Error as error:
        raise FailedPrecondition(
            f"the store {path} can't be opened: {error}. Put it back from a copy, or move it away to begin "
            "anew: VMs that run now are then ended"
        ) from None
    return connection


def make_tables(connection: sqlite3.Connection) -> None:
    """Make the tables, in one commit."""
    connection.executescript(f"BEGIN IMMEDIATE; {_TABLES} PRAGMA user_version = {SCHEMA}; COMMIT;")


def _check_or_make_tables(connection: sqlite3.Connection, path: Path) -> None:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if not version:
        make_tables(connection)
    elif version != SCHEMA:
        raise FailedPrecondition(
            f"the store {path} has schema {version}, this release knows {SCHEMA} alone: install the release "
            "that wrote it again; to change releases nevertheless, have that one end the node's pods, and "
            "move the store away"
        )


def _reserve(connection: sqlite3.Connection) -> None:
    """Reserve room in the file and its log, unless the disk is full already."""
    connection.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}")
    grow = "INSERT OR REPLACE INTO settings (name, value) VALUES ('reserve', printf('%.*c', ?, ' '))"
    shrink = "DELETE FROM settings WHERE name = 'reserve'"
    for sql, parameters in ((grow, (_RESERVE_BYTES,)), (shrink, ())):
        try:
            connection.execute(sql, parameters)
        except sqlite3.OperationalError as error:
            if "full" not in str(error):
                raise


def apply(connection: sqlite3.Connection, writes: Sequence[Write]) -> list[Exception | None]:
    """Do all of `writes` in one commit. Return, for each one, None or the error with which it alone failed.

    :raise InfranetesError: the commit failed, and none of the writes is done.
    """
    results: list[Exception | None] = []
    try:
        connection.execute("BEGIN IMMEDIATE")
        for write in writes:
            connection.execute("SAVEPOINT one")
            try:
                write(connection)
                connection.execute("RELEASE one")
                results.append(None)
            except Exception as error:
                if not connection.in_transaction:  # a full disk rolls all of it back
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
    """Return the error that tells the caller why a write failed."""
    if isinstance(error, sqlite3.OperationalError) and "full" in str(error):
        return ResourceExhausted("the disk of the state directory is full: make room and try again")
    if isinstance(error, sqlite3.OperationalError):
        return Unavailable(f"the store can't be written: {error}; the state directory's disk may be at fault")
    return error


def load(connection: sqlite3.Connection) -> Contents:
    """Load everything in the store."""
    sandboxes = connection.execute(f"SELECT {', '.join(_SANDBOX_COLUMNS)} FROM sandboxes")  # noqa: S608
    containers = connection.execute(
        f"SELECT {', '.join(_CONTAINER_COLUMNS)} FROM containers"  # noqa: S608
    )
    pool = connection.execute(f"SELECT {', '.join(_POOL_COLUMNS)} FROM pool")  # noqa: S608
    attachments = connection.execute(f"SELECT {', '.join(_ATTACHMENT_COLUMNS)} FROM attachments")  # noqa: S608
    logs = connection.execute("SELECT container_id, cursor, inode, size, done FROM logs")
    return Contents(
        sandboxes=tuple(_record(SandboxRecord, SandboxState, _SANDBOX_COLUMNS, row) for row in sandboxes),
        containers=tuple(
            _record(ContainerRecord, ContainerState, _CONTAINER_COLUMNS, row) for row in containers
        ),
        pool=tuple(_record(PoolRecord, PoolState, _POOL_COLUMNS, row) for row in pool),
        logs={row[0]: LogPosition(row[1], row[2], row[3], bool(row[4])) for row in logs},
        settings=dict(connection.execute("SELECT name, value FROM settings").fetchall()),
        attachments=tuple(AttachmentRecord(*row) for row in attachments),
    )


def _record(
    record: Callable[..., _Record],
    state: Callable[[_Value], enum.Enum],
    columns: tuple[str, ...],
    row: tuple[_Value, ...],
) -> _Record:
    fields: dict[str, object] = dict(zip(columns, row, strict=True))
    fields["state"] = state(row[columns.index("state")])
    if "claimed" in fields:
        fields["claimed"] = bool(fields["claimed"])
    return record(**fields)


def put(table: str, record: SandboxRecord | ContainerRecord | PoolRecord) -> Write:
    """Return a write that inserts the record, or replaces the one with its id."""
    columns = _COLUMNS[type(record)]
    values = [getattr(record, name) for name in columns]
    values[columns.index("state")] = record.state.value
    if not isinstance(record, PoolRecord):
        values[columns.index("claimed")] = int(record.claimed)
    placeholders = ", ".join("?" * len(columns))
    updates = ", ".join(f"{name} = excluded.{name}" for name in columns if name != "id")
    # Not REPLACE: it deletes the row first, and with it the rows that refer to it.
    sql = (
        f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({placeholders}) "  # noqa: S608 - names are ours
        f"ON CONFLICT (id) DO UPDATE SET {updates}"
    )
    return _execute(sql, values)


def delete(table: str, id: str) -> Write:
    """Return a write that deletes a record and all rows that refer to it."""
    return _execute(f"DELETE FROM {table} WHERE id = ?", (id,))  # noqa: S608 - names are ours


def update_pool(record: PoolRecord) -> Write:
    """Return a write that replaces the pool's record with this id, if there still is one.

    A VM that was claimed or has ended is not recorded again."""
    names = [name for name in _POOL_COLUMNS if name != "id"]
    values = [record.state.value if name == "state" else getattr(record, name) for name in names]
    sql = f"UPDATE pool SET {', '.join(f'{name} = ?' for name in names)} WHERE id = ?"  # noqa: S608
    return _execute(sql, (*values, record.id))


def claim(record: SandboxRecord) -> Write:
    """Return a write that makes the pool's VM with the record's id the sandbox's.

    It fails with FailedPrecondition if the pool has no idle VM with that id, token, instance and provider; if
    the record has no instance, no stopped one with that id, token and provider."""
    insert = put("sandboxes", record)
    state = PoolState.IDLE if record.instance_id else PoolState.STOPPED

    def write(connection: sqlite3.Connection) -> None:
        taken = connection.execute(
            "DELETE FROM pool WHERE id = ? AND token = ? AND provider = ? AND state = ? "
            "AND ? IN ('', instance_id)",
            (record.id, record.token, record.provider, state.value, record.instance_id),
        )
        if taken.rowcount != 1:
            name = record.instance_id or record.id
            raise FailedPrecondition(f"the pool has no {state.value} VM {name}: it was claimed before")
        insert(connection)

    return write


def put_log(container_id: str, position: LogPosition) -> Write:
    """Return a write that saves a log's position, if its container has a record."""
    row = (container_id, position.cursor, position.inode, position.size, int(position.done), container_id)
    return _execute(
        "INSERT INTO logs (container_id, cursor, inode, size, done) SELECT ?, ?, ?, ?, ? "
        "WHERE EXISTS (SELECT 1 FROM containers WHERE id = ?) ON CONFLICT (container_id) DO UPDATE SET "
        "cursor = excluded.cursor, inode = excluded.inode, size = excluded.size, done = excluded.done",
        row,
    )


def put_attachment(record: AttachmentRecord) -> Write:
    """Return a write that inserts the record, or replaces the one of the same volume."""
    names = ", ".join(_ATTACHMENT_COLUMNS)
    places = ", ".join("?" * len(_ATTACHMENT_COLUMNS))
    sql = f"INSERT OR REPLACE INTO attachments ({names}) VALUES ({places})"  # noqa: S608 - names are ours
    return _execute(sql, attrs.astuple(record))


def delete_setting(name: str) -> Write:
    """Return a write that deletes one setting, if there is one."""
    return _execute("DELETE FROM settings WHERE name = ?", (name,))


def put_setting(name: str, value: str) -> Write:
    """Return a write that saves one setting."""
    return _execute(
        "INSERT INTO settings (name, value) VALUES (?, ?) "
        "ON CONFLICT (name) DO UPDATE SET value = excluded.value",
        (name, value),
    )


def _execute(sql: str, values: Sequence[_Value]) -> Write:
    def write(connection: sqlite3.Connection) -> None:
        connection.execute(sql, values)

    return write
