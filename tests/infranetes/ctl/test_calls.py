# SPDX-License-Identifier: Apache-2.0
"""The exit status that follows from the daemon's answer."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from google.protobuf.message import Message
from twisted.internet.defer import Deferred, succeed
from twisted.trial.unittest import SynchronousTestCase

from infranetes.ctl import calls
from infranetes.ctl.calls import Ask
from infranetes.ctl.session import DONE, FAILED
from infranetes_common.concurrency import start
from infranetes_common.wire import control


class OrphanTests(SynchronousTestCase):
    def status(self, ask: Ask, answer: Message) -> int:
        class Stub:
            def __getattr__(self, name: str) -> Any:  # Any: a call of whatever kind
                def call(request: Message, timeout: float) -> Deferred[Message]:
                    return succeed(answer)

                return call

        stub: Any = Stub()

        async def asked() -> int:
            return (await ask(stub, Namespace(ids=[], dry_run=False)))[1]

        return self.successResultOf(start(asked()))

    def test_all_providers_were_asked(self) -> None:
        self.assertEqual(self.status(calls.orphans, control.ListOrphansResponse()), DONE)
        self.assertEqual(self.status(calls.end_orphans, control.EndOrphansResponse()), DONE)

    def test_one_could_not_be_asked(self) -> None:
        troubles = ["aws is not ready: no credentials"]
        self.assertEqual(self.status(calls.orphans, control.ListOrphansResponse(troubles=troubles)), FAILED)
        self.assertEqual(
            self.status(calls.end_orphans, control.EndOrphansResponse(troubles=troubles)), FAILED
        )
