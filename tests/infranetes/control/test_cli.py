# SPDX-License-Identifier: Apache-2.0
"""What infranetes-ctl says of a command that it can't carry out, before any daemon is asked."""

from __future__ import annotations

import contextlib
import io
import json

from twisted.trial.unittest import SynchronousTestCase

from infranetes.control.arguments import command_first
from infranetes.control.cli import main, parser
from infranetes.control.commands import COMMANDS
from infranetes.control.session import USAGE


class RefusalTests(SynchronousTestCase):
    def said(self, *arguments: str) -> tuple[str, str]:
        """What is printed, and what is printed on standard error."""
        out, words = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(words):
            self.assertEqual(main(arguments), USAGE)
        return out.getvalue(), words.getvalue()

    def test_a_configuration_that_can_not_be_read(self) -> None:
        out, words = self.said("--json", "--config", "/nonexistent", "pods")
        self.assertIn("/nonexistent: can't be read", json.loads(out)["error"])
        self.assertIn("/nonexistent: can't be read", words)
        self.assertEqual(self.said("--config", "/nonexistent", "pods")[0], "")

    def test_a_trace_from_nowhere(self) -> None:
        out, words = self.said("services", "--trace", "10.96.0.1:443", "--json")
        self.assertIn("needs a POD", json.loads(out)["error"])
        self.assertIn("needs a POD", words)


class OrderTests(SynchronousTestCase):
    """Options before the command."""

    def order(self, line: str) -> str:
        return " ".join(command_first(line.split(), COMMANDS))

    def test_a_commands_own_options(self) -> None:
        for line in (
            "--json --watch pods",
            "-w --socket /run/other.sock pods",
            "-f console web",
            "--limit 5 sizes",
            "--tail=5 logs web",
            "--handler small pool drain",
            "--service default/web services",
        ):
            before = parser().parse_args(command_first(line.split(), COMMANDS))
            words = line.split()
            command = next(word for word in words if word in COMMANDS)
            at = words.index(command)
            rest = words[at + 1 :]
            if command == "pool":
                rest, command = rest[1:], "pool drain"
            after = parser().parse_args([*command.split(), *rest, *words[:at]])
            self.assertEqual(before, after, line)

    def test_a_value_that_is_a_commands_name(self) -> None:
        self.assertEqual(self.order("--config pods --watch top"), "top --config pods --watch")
        self.assertEqual(self.order("--socket=pods top"), "top --socket=pods")

    def test_help_is_the_commands(self) -> None:
        self.assertEqual(self.order("-h top"), "top -h")

    def test_what_has_no_command_is_left(self) -> None:
        for line in (
            "",
            "--version",
            "--version pods",
            "nonsense pods",
            "--json nonsense pods",
            "-- pods",
            "-w no sense pods",
        ):
            self.assertEqual(self.order(line), line)
        self.assertEqual(self.order("--tail=5 nonsense pods"), "--tail=5 nonsense pods")

    def test_what_follows_the_command_is_left(self) -> None:
        line = "enter web -- infranetes-ctl --watch pods"
        self.assertEqual(self.order(line), line)
