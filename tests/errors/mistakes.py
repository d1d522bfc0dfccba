# SPDX-License-Identifier: Apache-2.0
"""What an operator reads of a mistake, place by place."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
from twisted.trial.unittest import SynchronousTestCase

from infranetes.ctl.cli import main, read
from infranetes.ctl.commands import COMMANDS
from infranetes.ctl.session import Session
from infranetes_common.concurrency import start
from tests.infranetes.cri.support import NO_CALL
from tests.infranetes.pods.fakes import FakeNode

CTL, CRICTL, PODS, DESCRIBE, EVENTS = "ctl", "crictl", "pods", "describe", "events"
"""Places where one looks: the command that is refused, and where a pod or a provider that fails is seen."""


@attrs.frozen
class Mistake:
    """A mistake.

    :ivar cause: a pattern of what has to be said of it. :ivar way_out: the same of what to do."""

    cause: str
    way_out: str


class MistakeCase(SynchronousTestCase):
    """Makes mistakes on a node of fakes, and reads what is said of them."""

    def told(self, mistake: Mistake, said: Mapping[str, str], *, cause_alone: tuple[str, ...] = ()) -> None:
        """Check that each place names the cause and the way out.

        :param cause_alone: places that have room for the cause alone; others say the rest."""
        self.assertTrue(said)
        for place, words in said.items():
            line = " ".join(words.split())
            self.assertRegex(line, mistake.cause, f"{place} does not name the cause")
            self.assertNotIn("Traceback", words)
            if place not in cause_alone:
                self.assertRegex(line, mistake.way_out, f"{place} does not say what to do")

    def typed(self, *words: str, code: int) -> str:
        """Return what infranetes-ctl says on standard error, or else on standard output."""
        out, told = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(told):
            try:
                ended = main(words)
            except SystemExit as refused:
                ended = int(refused.code or 0)
        self.assertEqual(ended, code, out.getvalue() + told.getvalue())
        return told.getvalue() or out.getvalue()

    def file(self, content: str) -> str:
        """Return the path of a configuration."""
        path = Path(self.mktemp()).absolute()
        path.write_text(content)
        return str(path)

    def asked(self, world: FakeNode, *words: str) -> str:
        """Return what infranetes-ctl prints of a node, or the error that it ends with."""
        options = read(words)
        reactor: Any = None
        stub: Any = Stub(world)
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            ended = start(COMMANDS[options.command].run(Session(reactor, stub, options)))
        failures: list[str] = []
        ended.addErrback(lambda failure: failures.append(str(failure.value)))
        self.successResultOf(ended)
        return failures[0] if failures else out.getvalue()


class Stub:
    """The control socket of a node of fakes, without a socket."""

    def __init__(self, world: FakeNode) -> None:
        self._node = world.control
        self._description = world.description

    def __getattr__(self, name: str) -> Any:  # Any: a call of whatever kind
        its = self._description if hasattr(self._description, name) else self._node

        def call(request: object, timeout: float) -> Any:
            return getattr(its, name)(request, NO_CALL)

        return call
