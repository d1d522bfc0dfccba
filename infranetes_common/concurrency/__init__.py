# SPDX-License-Identifier: Apache-2.0
"""The toolbox: helpers for Deferreds, threads and files that Twisted does not have.

Use Twisted's own where they fit: `DeferredLock` for one lock, `DeferredSemaphore` for at most N at once,
`DeferredQueue`, `DeferredList`, `task.LoopingCall`, `ClientService` and its retry policies.

=================  ==================================================================
`start`            start a coroutine
`deferred`         decorator: an `async def` method that returns a Deferred
`sleep`            wait some seconds
`within`           a deadline whose error says what took too long
`shielded`         wait for work that goes on when the waiter is cancelled
`cancellable`      tell the end of a cancelled client as CancelledError
`settled`          wait until all of several have ended, even if some fail
`until_ended`      wait for an end, even if the wait is cancelled; `to_its_end`: for its result too
`Flight`           work that several callers share and that outlives them
`Coro`             the type of a coroutine of `async def`
`Event`            something that happens once
`Notifier`         wakes all waiters, any number of times
`KeyedLock`        a lock per key
`backoff`          growing pauses between attempts
`run_in_thread`    blocking work in bounded pools, by purpose
`Lanes`            blocking work that may hang forever
`replace_file`     replace a file's content as a whole or not at all
`sync_directory`   make renames and removals survive a loss of power
`lock_file`        lock a file that only one descriptor can hold
`lock_file_within` the same, once whoever holds it has let go
=================  ==================================================================
"""

from infranetes_common.concurrency.backoff import backoff
from infranetes_common.concurrency.event import Event
from infranetes_common.concurrency.files import lock_file, lock_file_within, replace_file, sync_directory
from infranetes_common.concurrency.flight import (
    Coro,
    Flight,
    Work,
    cancellable,
    deferred,
    settled,
    shielded,
    sleep,
    start,
    to_its_end,
    until_ended,
    within,
)
from infranetes_common.concurrency.keyed_lock import KeyedLock
from infranetes_common.concurrency.lanes import Lanes, still_alive
from infranetes_common.concurrency.notifier import Notifier
from infranetes_common.concurrency.threads import IMAGES, KEEPING, LOGS, run_in_thread

__all__ = [
    "IMAGES",
    "KEEPING",
    "LOGS",
    "Coro",
    "Event",
    "Flight",
    "KeyedLock",
    "Lanes",
    "Notifier",
    "Work",
    "backoff",
    "cancellable",
    "deferred",
    "lock_file",
    "lock_file_within",
    "replace_file",
    "run_in_thread",
    "settled",
    "shielded",
    "sleep",
    "start",
    "still_alive",
    "sync_directory",
    "to_its_end",
    "until_ended",
    "within",
]
