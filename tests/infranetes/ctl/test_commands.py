# SPDX-License-Identifier: Apache-2.0
"""infranetes-ctl's command line: every command, with the common flags in every position."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Mapping

from twisted.trial.unittest import SynchronousTestCase

from infranetes.ctl.arguments import exactly
from infranetes.ctl.cli import parser, read
from infranetes.ctl.commands import COMMANDS
from infranetes.ctl.session import USAGE

#: The arguments that commands require.
NEEDED: Mapping[str, list[str]] = {
    name: ["abc"]
    for name in ("console", "describe", "enter", "exec", "logs", "screenshot", "sleep", "vnc", "wake")
} | {"checkpoint": ["abc", "/file"], "keep": ["abc", "--as", "warm"]}


def ways(name: str) -> Iterator[list[str]]:
    """Yield the command without flags, in each way that it can be written."""
    if COMMANDS[name].alone:
        yield [name, *NEEDED.get(name, [])]
    if COMMANDS[name].part_of:
        yield [COMMANDS[name].part_of, name]


class FlagTests(SynchronousTestCase):
    def test_every_command_takes_shared_flags_before_and_after_it(self) -> None:
        flags = ["--json", "--socket", "/s", "--config", "/c"]
        for name in COMMANDS:
            for words in ways(name):
                plain = parser().parse_args(words)
                self.assertEqual((plain.command, plain.json, plain.socket), (name, False, None), words)
                before = parser().parse_args([*flags, *words])
                after = parser().parse_args([*words, *flags])
                self.assertEqual(before, after, words)
                self.assertEqual((str(after.socket), str(after.config)), ("/s", "/c"), words)
                self.assertTrue(after.json, words)

    def test_the_last_one_counts(self) -> None:
        given = parser().parse_args(["--socket", "/a", "pods", "--socket", "/b"])
        self.assertEqual(str(given.socket), "/b")

    def test_what_is_said_of_the_pool_holds_for_what_is_done_with_it(self) -> None:
        for words in (["pool", "--handler", "fast", "drain"], ["pool", "drain", "--handler", "fast"]):
            given = parser().parse_args(words)
            self.assertEqual((given.command, given.handler, given.dry_run), ("drain", "fast", False))
        given = parser().parse_args(["pool", "drain", "--dry-run"])
        self.assertEqual((given.command, given.handler, given.dry_run), ("drain", None, True))

    def test_an_alias_is_the_command(self) -> None:
        for name, command in COMMANDS.items():
            if command.part_of and command.alone:
                alias, whole = parser().parse_args([name]), parser().parse_args([command.part_of, name])
                its_parts = {"dry_run"} if any(each.part_of == name for each in COMMANDS.values()) else set()
                shared = {key: value for key, value in vars(alias).items() if key not in its_parts}
                self.assertEqual(shared, {key: vars(whole)[key] for key in shared})


class RefusedTests(SynchronousTestCase):
    """What is said of a command line that lacks something."""

    def refusal(self, *words: str) -> str:
        told = io.StringIO()
        with contextlib.redirect_stderr(told), self.assertRaises(SystemExit) as ended:
            parser().parse_args(words)
        self.assertEqual(ended.exception.code, USAGE)
        return told.getvalue().splitlines()[-1]

    def test_what_may_be_left_out_is_not_asked_for(self) -> None:
        for name in NEEDED:
            words = self.refusal(name)
            needed = {"checkpoint": "POD, FILE", "keep": "POD, --as"}.get(name, "POD")
            self.assertTrue(words.endswith(f"required: {needed}"), words)


class EnteredCommandTests(SynchronousTestCase):
    """The command that `enter` is to run, however argparse treats dashes."""

    def given(self, *words: str) -> tuple[str, list[str]]:
        options = parser().parse_args(words)
        return options.pod, exactly(options.words, words)

    def test_options_may_stand_between_the_pod_and_the_command(self) -> None:
        for words in (["exec", "web", "-c", "main", "-i"], ["exec", "-ic", "main", "web"]):
            options = read([*words, "--", "sh", "-c", "x -- y", "--"])
            self.assertEqual((options.pod, options.in_container, options.stdin), ("web", "main", True))
            self.assertEqual(options.words, ["sh", "-c", "x -- y", "--"])
        options = read(["enter", "web", "--json", "--", "ls", "-l"])
        self.assertEqual((options.json, options.words), (True, ["ls", "-l"]))
        self.assertEqual(read(["exec", "--", "web", "ls", "--", "-l"]).words, ["ls", "--", "-l"])

    def test_without_a_command(self) -> None:
        self.assertEqual(self.given("enter", "web"), ("web", []))
        self.assertEqual(self.given("enter", "web", "--"), ("web", []))

    def test_flags_and_dashes_behind_the_first_ones_are_the_commands(self) -> None:
        for command in (
            ["ls", "-l"],
            ["--", "x"],
            ["x", "--", "--json"],
            ["--", "--"],
            ["sh", "-c", "--", ""],
        ):
            self.assertEqual(self.given("enter", "web", "--", *command), ("web", command))
            self.assertEqual(
                self.given("--json", "enter", "--config", "/c", "web", "--", *command)[1], command
            )

    def test_the_pod_may_come_behind_them(self) -> None:
        self.assertEqual(self.given("enter", "--", "web", "ls", "--", "-l"), ("web", ["ls", "--", "-l"]))

    def test_words_before_them_are_its_first(self) -> None:
        self.assertEqual(self.given("enter", "web", "ls"), ("web", ["ls"]))
        self.assertEqual(self.given("enter", "web", "ls", "--", "-l"), ("web", ["ls", "-l"]))
