# SPDX-License-Identifier: Apache-2.0
"""What is remembered of guests while no daemon runs."""

from __future__ import annotations

import stat
import tempfile
from pathlib import Path
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from infranetes.machines.agentless.configuration import GuestDisk, PodFacts
from infranetes.machines.sandbox_memory import SandboxMemory
from infranetes_common.concurrency import start
from infranetes_common.errors import ResourceExhausted
from tests.support.inline_threads import InlineThreads

FACTS = PodFacts(
    "s1",
    "default",
    "web-0",
    ("10.96.0.10",),
    ("default.svc.cluster.local",),
    {"PASSWORD": "secret"},
    {"/etc/keys": "v1/key"},
    (GuestDisk("abc", "ext4", ("noatime",), True, "/data"),),
)


class MemoryTests(SynchronousTestCase):
    def setUp(self) -> None:
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.directory = Path(directory.name) / "guests"
        self.memory = SandboxMemory(InlineThreads().reactor, self.directory, PodFacts)

    def do(self, work: Any) -> Any:
        return self.successResultOf(start(work))

    def test_what_was_saved_is_loaded(self) -> None:
        self.do(self.memory.save(FACTS.sandbox_id, FACTS))
        self.assertEqual(
            self.do(SandboxMemory(InlineThreads().reactor, self.directory, PodFacts).load("s1")), FACTS
        )

    def test_nobody_else_can_read_it(self) -> None:
        self.do(self.memory.save(FACTS.sandbox_id, FACTS))
        self.assertEqual(stat.S_IMODE(self.directory.stat().st_mode), 0o700)

    def test_what_was_never_saved_or_is_forgotten_is_unknown(self) -> None:
        self.assertIsNone(self.do(self.memory.load("s1")))
        self.do(self.memory.save(FACTS.sandbox_id, FACTS))
        self.do(self.memory.forget("s1"))
        self.do(self.memory.forget("s1"))
        self.assertIsNone(self.do(self.memory.load("s1")))

    def test_only_those_are_kept_that_are_there(self) -> None:
        self.do(self.memory.keep_only([]))
        self.do(self.memory.save(FACTS.sandbox_id, FACTS))
        (self.directory / "s1.json.half").write_text("")
        self.do(self.memory.keep_only(["s1"]))
        self.assertEqual([path.name for path in self.directory.iterdir()], ["s1.json"])
        self.do(self.memory.keep_only(["s2"]))
        self.assertEqual(list(self.directory.iterdir()), [])

    def test_what_is_damaged_is_unknown(self) -> None:
        self.do(self.memory.save(FACTS.sandbox_id, FACTS))
        for text in ("{", "[]", '{"hostname": "x"}'):
            (self.directory / "s1.json").write_text(text)
            self.assertIsNone(self.do(self.memory.load("s1")), text)

    def test_a_directory_that_can_not_be_written_is_told(self) -> None:
        self.directory.write_text("a file")
        self.failureResultOf(start(self.memory.save(FACTS.sandbox_id, FACTS)), ResourceExhausted)
