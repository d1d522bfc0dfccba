# SPDX-License-Identifier: Apache-2.0
"""What infranetes-ctl says of a command that it can't carry out, before any daemon is asked."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import socket
import tempfile
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from infranetes.ctl.cli import _refused, _why_down, main, parser
from infranetes.ctl.session import DOWN, FAILED, USAGE
from infranetes_common import __version__


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


class SocketTests(SynchronousTestCase):
    def status(self, path: Path) -> int:
        """Return the status of a call of a socket, as a user who is not root."""
        if os.geteuid() == 0:
            os.seteuid(65534)
            self.addCleanup(os.seteuid, 0)
        with contextlib.redirect_stderr(io.StringIO()):
            return _refused(parser().read(["pods"]), *_why_down(path))

    def test_a_socket_for_others_is_no_daemon_that_is_down(self) -> None:
        directory = tempfile.mkdtemp(prefix="ctl-", dir="/tmp")
        self.addCleanup(shutil.rmtree, directory)
        path = Path(directory) / "s"
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
            server.listen()
            os.chmod(directory, 0o705)
            os.chmod(path, 0)
            self.assertEqual(self.status(path), FAILED)
        self.assertEqual(self.status(Path("/nowhere/at/all")), DOWN)


class OrderTests(SynchronousTestCase):
    """Options before the command."""

    def order(self, line: str) -> str:
        return " ".join(parser().in_order(line.split()))

    def test_every_option_of_every_command(self) -> None:
        """Its value is the name of a command."""
        top = parser()
        for name, one in [
            *top.commands.items(),
            *((" ".join(names), each) for names, each in top.parts.items()),
        ]:
            for action in one._actions:
                for option in action.option_strings:
                    words = [option] if action.nargs == 0 else [option, "pods"]
                    expected = [*name.split(), *words, "x"]
                    self.assertEqual(top.in_order([*words, *name.split(), "x"]), expected)
                    if " " in name:
                        whole, part = name.split()
                        self.assertEqual(top.in_order([whole, *words, part, "x"]), expected)

    def test_no_option_has_a_value_with_one_command_and_none_with_another(self) -> None:
        top = parser()
        kinds: dict[str, bool] = {}
        for one in (top, *top.commands.values(), *top.parts.values()):
            for action in one._actions:
                for option in action.option_strings:
                    self.assertEqual(kinds.setdefault(option, action.nargs != 0), action.nargs != 0, option)

    def test_both_places_mean_the_same(self) -> None:
        for before, after in (
            ("--json --watch pods", "pods --json --watch"),
            ("-f console web", "console web -f"),
            ("--limit 5 sizes", "sizes --limit 5"),
            ("--tail=5 logs web", "logs web --tail 5"),
            ("--dry-run pool drain", "pool drain --dry-run"),
            ("--handler config pool drain", "pool drain --handler config"),
            ("--handler drain pool", "pool --handler drain"),
            ("--service pods services", "services --service pods"),
        ):
            self.assertEqual(parser().read(before.split()), parser().read(after.split()), before)

    def test_help_is_the_commands(self) -> None:
        self.assertEqual(self.order("-h top"), "top -h")

    def test_what_has_no_command_is_left(self) -> None:
        for line in ("", "--version", "nonsense pods", "--json nonsense pods", "-- pods", "-w no sense pods"):
            self.assertEqual(self.order(line), line)
        self.assertEqual(self.order("--tail=5 nonsense pods"), "--tail=5 nonsense pods")

    def test_what_follows_the_command_is_left(self) -> None:
        line = "enter web -- infranetes-ctl --watch pods"
        self.assertEqual(self.order(line), line)
        self.assertEqual(self.order("pool x --dry-run drain"), "pool x --dry-run drain")


class WrongWordsTests(SynchronousTestCase):
    """What is said of words that no command takes."""

    def refusal(self, line: str) -> str:
        told = io.StringIO()
        with contextlib.redirect_stderr(told), self.assertRaises(SystemExit) as ended:
            parser().read(line.split())
        self.assertEqual(ended.exception.code, USAGE)
        return told.getvalue()

    def test_the_usage_is_that_of_the_command(self) -> None:
        self.assertIn("usage: infranetes-ctl logs", self.refusal("logs web --sinks 5m"))
        self.assertIn("usage: infranetes-ctl pool drain", self.refusal("--dry pool drain"))
        self.assertIn("usage: infranetes-ctl [-h]", self.refusal("--nonsense"))

    def test_options_of_an_entered_command_follow_dashes(self) -> None:
        words = self.refusal("enter web ls -l")
        self.assertIn("usage: infranetes-ctl enter", words)
        self.assertIn("unrecognized arguments: -l (options of the command that is run follow a `--`)", words)

    def test_options_are_not_abbreviated(self) -> None:
        self.assertIn("unrecognized arguments: --js", self.refusal("pods --js"))

    def test_the_version_may_be_asked_of_a_command(self) -> None:
        told = io.StringIO()
        with contextlib.redirect_stdout(told), self.assertRaises(SystemExit) as ended:
            parser().read(["pods", "--version"])
        self.assertEqual(ended.exception.code, 0)
        self.assertEqual(told.getvalue(), f"infranetes-ctl {__version__}\n")
