"""The store as the reactor sees it: every write a Deferred, all of them in one thread of their own.

Writes that wait together are committed together, so a thousand pods that start at once share some tens
of fsyncs. Writes are done in the order in which they were asked for.
"""

from __future__ import annotations

import queue
import threading
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred, succeed
from twisted.python.failure import Failure

from infranetes.pods import database
from infranetes.pods.records import ContainerRecord, Contents, LogPosition, PoolRecord, SandboxRecord
from infranetes_common.errors import Unavailable

FILE = "store/infranetes.sqlite"
MAX_GROUP = 500  # writes in one commit


class Store:
    """The records of one state directory.

    Every Deferred fires once the write is on the disk, or fails with `ResourceExhausted` or `Unavailable`
    and the record as it was. Cancelling one does not undo its write.

    :param reactor: fires the Deferreds (`IReactorFromThreads`).
    """

    def __init__(self, reactor: Any, state_dir: Path) -> None:
        self._reactor = reactor
        self._path = state_dir / FILE
        self._queue: queue.SimpleQueue[tuple[database.Write, Deferred[Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed: Deferred[None] | None = None

    def open(self) -> Deferred[Contents]:
        """Open or make the file; all its contents.

        :raise ConfigError: the directory can't be written.
        :raise FailedPrecondition: not a store, or one of a newer release."""
        opened: Deferred[Contents] = Deferred()
        self._thread = threading.Thread(
            target=self._thd_run, args=(opened,), name="infranetes-store", daemon=True
        )
        self._thread.start()
        return opened

    def put_sandbox(self, record: SandboxRecord) -> Deferred[None]:
        """Keep the record in place of any with its id."""
        return self._write(database.put("sandboxes", record))

    def delete_sandbox(self, sandbox_id: str) -> Deferred[None]:
        """Forget the sandbox and its containers. Unknown: nothing to do."""
        return self._write(database.delete("sandboxes", sandbox_id))

    def put_pool(self, record: PoolRecord) -> Deferred[None]:
        """Keep the record of a new VM of the pool."""
        return self._write(database.put("pool", record))

    def update_pool(self, record: PoolRecord) -> Deferred[None]:
        """Keep the record in place of the one with its id. Claimed or deleted meanwhile: nothing to do."""
        return self._write(database.update_pool(record))

    def delete_pool(self, id: str) -> Deferred[None]:
        """Forget a VM of the pool. Unknown: nothing to do."""
        return self._write(database.delete("pool", id))

    def claim(self, record: SandboxRecord) -> Deferred[None]:
        """Make an idle VM of the pool a sandbox's, both in one commit.

        :raise FailedPrecondition: there is no such VM; it was claimed before."""
        return self._write(database.claim(record))

    def put_container(self, record: ContainerRecord) -> Deferred[None]:
        """Keep the record in place of any with its id."""
        return self._write(database.put("containers", record))

    def delete_container(self, container_id: str) -> Deferred[None]:
        """Forget the container and its log's position. Unknown: nothing to do."""
        return self._write(database.delete("containers", container_id))

    def put_log(self, container_id: str, position: LogPosition) -> Deferred[None]:
        """Keep the log's position. A container that has no record: nothing to do."""
        return self._write(database.put_log(container_id, position))

    def put_setting(self, name: str, value: str) -> Deferred[None]:
        """Keep a setting in place of any with its name."""
        return self._write(database.put_setting(name, value))

    def close(self) -> Deferred[None]:
        """Finish what was asked for and let go of the file and the thread. Twice is once."""
        if self._thread is None:
            return succeed(None)
        if self._closed is None:
            self._closed = Deferred()
            self._queue.put(None)
        done: Deferred[None] = Deferred()

        def fire(result: None) -> None:
            done.callback(None)
            return result

        self._closed.addCallback(fire)
        return done

    def _write(self, write: database.Write) -> Deferred[None]:
        done: Deferred[None] = Deferred(lambda _: None)
        if self._closed is not None or self._thread is None:
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
                results = [error] * len(group)
            answers = [(done, result) for (_, done), result in zip(group, results, strict=True)]
            self._reactor.callFromThread(_answer, answers)
        connection.close()
        self._reactor.callFromThread(self._fire_closed)

    def _thd_next_group(self) -> tuple[list[tuple[database.Write, Deferred[Any]]], bool]:
        """The next writes to commit together, and whether to go on after them."""
        group: list[tuple[database.Write, Deferred[Any]]] = []
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
        """The file could not be opened: answer until closed."""
        while (item := self._queue.get()) is not None:
            error = Unavailable("the store could not be opened; the log of the start says why")
            self._reactor.callFromThread(_answer, [(item[1], error)])
        self._reactor.callFromThread(self._fire_closed)

    def _fire_closed(self) -> None:
        assert self._closed is not None
        self._closed.callback(None)


def _answer(answers: list[tuple[Deferred[Any], Any]]) -> None:
    for done, result in answers:
        if done.called:
            continue
        if isinstance(result, Exception):
            done.errback(result)
        else:
            done.callback(result)
