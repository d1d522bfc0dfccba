# SPDX-License-Identifier: Apache-2.0
"""Commands that are run to their end."""

from __future__ import annotations

from twisted.trial.unittest import TestCase

from infranetes.providers.qemu.program.process import pids_by_argument
from infranetes_common import commands
from infranetes_common.commands import Output
from infranetes_common.concurrency import start
from infranetes_common.errors import DeadlineExceeded, FailedPrecondition, InfranetesError
from infranetes_common.reactors import installed
from tests.harness.needs import needs_netns
from tests.support.waiting import until

reactor = installed()


class RunTests(TestCase):
    """Commands that are waited for."""

    async def test_code_and_output(self) -> None:
        output = await commands.run(reactor, ["sh", "-c", "cat; echo bad >&2; exit 3"], 10.0, b"in")
        self.assertEqual((output.code, output.stdout, output.message()), (3, b"in", "bad"))
        output = await commands.run(reactor, ["sh", "-c", "kill -9 $$"], 10.0)
        self.assertEqual(output.code, -9)

    @needs_netns
    async def test_a_failure_has_its_words(self) -> None:
        error = await self.assertFailure(
            start(commands.check(reactor, ["ip", "link", "show", "nosuch0"], 10.0)),
            InfranetesError,
        )
        self.assertIn("nosuch0", str(error))

    def test_the_end_of_long_words_has_no_half_of_a_secret(self) -> None:
        words = f"{'word ' * 300}GET /?token={'Planted' * 100} failed"
        for output in (Output(1, b"", words.encode()), Output(1, words.encode(), b"")):
            self.assertEqual(output.message().replace("word ", ""), "GET /?token=(hidden) failed")
        url = f"GET https://b.example/?X-Amz-Security-Token={'Planted' * 200}&x=1"
        self.assertEqual(Output(1, b"", url.encode()).message(), "(hidden)&x=1")

    async def test_one_that_hangs_is_killed_and_not_waited_for(self) -> None:
        await self.assertFailure(start(commands.run(reactor, ["sleep", "3661.25"], 0.2)), DeadlineExceeded)
        await until(lambda: not pids_by_argument(["3661.25"]), "it is killed")

    def test_a_program_that_is_not_there_is_named(self) -> None:
        with self.assertRaises(FailedPrecondition) as caught:
            commands.find_program("no-such-program")
        self.assertIn("no-such-program", str(caught.exception))
