# SPDX-License-Identifier: Apache-2.0
"""The store, as the reactor's thread uses it: every write returns a Deferred, and one other thread does them.

Writes that wait at the same time are committed together, so a thousand pods that start at once share some
tens of fsyncs. Writes are done in the order of the calls.
"""

from __future__ import annotations

import queue
import threading
from pathlib import Path

from twisted.internet.defer import Deferred, succeed
from twisted.internet.interfaces import IReactorFromThreads
from twisted.python.failure import Failure

from infranetes.machines.pool_record import PoolRecord
from infranetes.pods.store import database
from infranetes.pods.store.records import (
    AttachmentRecord,
    ContainerRecord,
    Contents,
    LogPosition,
    SandboxRecord,
)
from infranetes_common.concurrency import Event
from infranetes_common.errors import Unavailable

FILE = "store/infranetes.sqlite"
MAX_GROUP = 500  # writes in one commit


class Store:
    """The records of one state directory.

    Every Deferred fires once the write is on the disk. If it fails, with `ResourceExhausted` or
    `Unavailable`, the record is as it was. Cancelling it does not undo the write.

    :param reactor: fires the Deferreds.
    """

    def __init__(self, reactor: IReactorFromThreads, state_dir: Path) -> None:
        self._reactor = reactor
        self._path = state_dir / FILE
        self._queue: queue.SimpleQueue[tuple[database.Write, Deferred[None]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closing = False
        self._closed: Event[None] = Event()

    def open(self) -> Deferred[Contents]:
        """Open the file, creating it if necessary. Fires with all its contents.

        :raise ConfigError: the directory can't be written.
        :raise FailedPrecondition: the file is not a store, or is one of another release's schema."""
        opened: Deferred[Contents] = Deferred()
        self._thread = threading.Thread(
            target=self._thd_run, args=(opened,), name="infranetes-store", daemon=True
        )
        self._thread.start()
        return opened

    def put_sandbox(self, record: SandboxRecord) -> Deferred[None]:
        """Save the record, in place of any with its id."""
        return self._write(database.put("sandboxes", record))

    def delete_sandbox(self, sandbox_id: str) -> Deferred[None]:
        """Delete the sandbox and its containers. Idempotent."""
        return self._write(database.delete("sandboxes", sandbox_id))

    def put_pool(self, record: PoolRecord) -> Deferred[None]:
        """Save the record of a new VM of the pool."""
        return self._write(database.put("pool", record))

    def update_pool(self, record: PoolRecord) -> Deferred[None]:
        """Save the record in place of the one with its id, unless that was claimed or deleted meanwhile."""
        return self._write(database.update_pool(record))

    def delete_pool(self, id: str) -> Deferred[None]:
        """Delete the record of a VM of the pool. Idempotent."""
        return self._write(database.delete("pool", id))

    def claim(self, record: SandboxRecord) -> Deferred[None]:
        """Make an idle or stopped VM of the pool a sandbox's, in one commit.

        :raise FailedPrecondition: the pool no longer has the VM: it was claimed before."""
        return self._write(database.claim(record))

    def put_container(self, record: ContainerRecord) -> Deferred[None]:
        """Save the record, in place of any with its id."""
        return self._write(database.put("containers", record))

    def delete_container(self, container_id: str) -> Deferred[None]:
        """Delete the container and its log's position. Idempotent."""
        return self._write(database.delete("containers", container_id))

    def put_log(self, container_id: str, position: LogPosition) -> Deferred[None]:
        """Save the log's position, if its container has a record."""
        return self._write(database.put_log(container_id, position))

    def put_attachment(self, record: AttachmentRecord) -> Deferred[None]:
        """Save the record, in place of the volume's former one."""
        return self._write(database.put_attachment(record))

    def delete_attachment(self, volume: str) -> Deferred[None]:
        """Delete a volume's record. Idempotent."""
        return self._write(database.delete("attachments", volume))

    def put_setting(self, name: str, value: str) -> Deferred[None]:
        """Save a setting, in place of any with its name."""
        return self._write(database.put_setting(name, value))

    def delete_setting(self, name: str) -> Deferred[None]:
        """Delete a setting. Idempotent."""
        return self._write(database.delete_setting(name))

    def close(self) -> Deferred[None]:
        """Do the pending writes, then close the file and end the thread. Idempotent."""
        if self._thread is None:
            return succeed(None)
        if not self._closing:
            self._closing = True
            self._queue.put(None)
        return self._closed.wait()

    def _write(self, write: database.Write) -> Deferred[None]:
        done: Deferred[None] = Deferred(lambda _: None)
        if self._closing or self._thread is None:
            done.errback(Unavailable("the daemon is stopping: the store is closed"))
        else:
            self._queue.put((write, done))
        return done

    def _thd_run(self, opened: Deferred[Contents]) -> None:
        try:
            connection = database.open_database(self._path)
            contents = database.load(connection)
        except Exception:
            self._reactor.callFromThread(opened.errback, Failure())
            self._thd_refuse()
            return
        self._reactor.callFromThread(opened.callback, contents)
        going = True
        while going:
            group, going = self._thd_next_group()
            if not group:
                continue
            try:
                results = database.apply(connection, [write for write, _ in group])
            except Exception as error:
                results = [error for _ in group]
            answers = [(done, result) for (_, done), result in zip(group, results, strict=True)]
            self._reactor.callFromThread(_answer, answers)
        connection.close()
        self._reactor.callFromThread(self._closed.succeed, None)

    def _thd_next_group(self) -> tuple[list[tuple[database.Write, Deferred[None]]], bool]:
        """Return the next writes to commit together, and whether to continue after them."""
        group: list[tuple[database.Write, Deferred[None]]] = []
        item = self._queue.get()
        while item is not None:
            group.append(item)
            if len(group) >= MAX_GROUP:
                return group, True
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                return group, True
        return group, False

    def _thd_refuse(self) -> None:
        """Fail every write until the store is closed, because the file could not be opened."""
        while (item := self._queue.get()) is not None:
            error = Unavailable("the store could not be opened; the log of the start says why")
            self._reactor.callFromThread(_answer, [(item[1], error)])
        self._reactor.callFromThread(self._closed.succeed, None)


def _answer(answers: list[tuple[Deferred[None], Exception | None]]) -> None:
    for done, error in answers:
        if done.called:
            continue
        if error is not None:
            done.errback(error)
        else:
            done.callback(None)
