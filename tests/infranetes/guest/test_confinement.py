# SPDX-License-Identifier: Apache-2.0
"""What infranetes-guest.service takes from the build of an image, and that it leaves what the build needs."""

from __future__ import annotations

from pathlib import Path

from twisted.internet.threads import deferToThread
from twisted.trial.unittest import TestCase

from tests.harness.needs import needs_systemd
from tests.infranetes.daemon.unit import GUEST_UNIT, UnitProgram
from tests.infranetes.guest import confined


@needs_systemd
class SandboxTests(TestCase):
    """The sandbox itself, made by systemd."""

    timeout = 300

    async def test_a_build_can_do_what_it_has_to_and_nothing_else(self) -> None:
        program = UnitProgram(Path(confined.__file__).read_text(), GUEST_UNIT)
        self.addCleanup(program.remove)

        def tried() -> str:
            program.start(str(program.directory))
            return program.finished()

        self.assertEqual(await deferToThread(tried), "done\n")
