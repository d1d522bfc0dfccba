# SPDX-License-Identifier: Apache-2.0
"""The lines that shells of guests are given."""

from __future__ import annotations

import os
import subprocess

from hypothesis import given
from hypothesis import strategies as some
from twisted.trial.unittest import SynchronousTestCase

from infranetes.machines.agentless.ssh.shells import (
    MAX_LINE,
    PosixShell,
    WindowsShell,
    check_posix,
    shell_for,
)
from infranetes_common.errors import InvalidArgument, NotOffered

LETTERS = some.characters(blacklist_characters="\0", blacklist_categories=["Cs"])
WORDS = some.lists(some.text(LETTERS, max_size=20), max_size=4)
MARKED = 'grep -ls "INFRANETES_COMMAND=mark1" /proc/[0-9]*/environ || true'


class ShellTests(SynchronousTestCase):
    def test_the_server_s_version_tells_which_it_is(self) -> None:
        self.assertIsInstance(shell_for("OpenSSH_for_Windows_9.5", True), WindowsShell)
        for server in ("OpenSSH_9.2p1 Debian-2", "dropbear_2022.83", ""):
            self.assertEqual(shell_for(server, True), PosixShell(sudo=True))

    def test_what_only_posix_has_is_refused_of_windows(self) -> None:
        check_posix(PosixShell(), "x")
        with self.assertRaisesRegex(NotOffered, "bringing files"):
            check_posix(WindowsShell(), "bringing files")


class PosixTests(SynchronousTestCase):
    def output(self, line: str, **environment: str) -> bytes:
        """Have a shell run a line, as a server does."""
        variables = {"PATH": os.environ["PATH"], **environment}
        ran = subprocess.run(["/bin/sh", "-c", line], capture_output=True, check=True, env=variables)
        return ran.stdout

    @given(WORDS)
    def test_words_arrive_as_they_are(self, words: list[str]) -> None:
        line = PosixShell().line(["printf", "%s|", "begin", *words], "m")
        self.assertEqual(self.output(line), "".join(f"{word}|" for word in ["begin", *words]).encode())

    def test_nothing_of_a_command_can_be_taken_for_sudo_s_own(self) -> None:
        line = PosixShell(sudo=True).line(["-u", "nobody"], "m")
        self.assertTrue(line.startswith("sudo -n -- /bin/sh -c "), line)

    def test_what_a_command_starts_can_be_found_by_its_mark(self) -> None:
        line = PosixShell().line(["sh", "-c", "echo $INFRANETES_COMMAND"], "abc")
        self.assertEqual(self.output(line), b"abc\n")

    def test_killing_ends_all_that_have_the_mark_and_nothing_else(self) -> None:
        shell = PosixShell()
        line, other_line = (
            shell.line(["sh", "-c", "sleep 600 & sleep 600"], "mark1"),
            shell.line(["cat"], "mark2"),
        )
        with (
            subprocess.Popen(["/bin/sh", "-c", line], stderr=subprocess.DEVNULL) as one,
            subprocess.Popen(["/bin/sh", "-c", other_line], stdin=subprocess.PIPE) as other,
        ):
            while self.output(MARKED).count(b"\n") < 3:
                continue
            self.output(shell.kill("mark1"))
            self.assertIn(one.wait(10), (-9, 137))
            self.assertIsNone(other.poll())

    def test_without_a_command_it_is_the_user_s_login_shell(self) -> None:
        line = PosixShell().line([], "m")
        self.assertEqual(self.output(f"echo 'echo $0' | {line}", SHELL="/bin/sh"), b"/bin/sh\n")

    def test_what_no_kernel_takes_is_refused(self) -> None:
        for words in (["a\0b"], ["x" * MAX_LINE], ["'" * (MAX_LINE // 3)]):
            with self.assertRaises(InvalidArgument):
                PosixShell().line(words, "m")


class WindowsTests(SynchronousTestCase):
    def test_words_are_quoted_for_the_program_and_then_for_cmd(self) -> None:
        for words, line in (
            (["dir"], "dir"),
            (["findstr", "two words"], 'findstr ^"two words^"'),
            (["echo", 'a"b', "100%", "x&y|z"], 'echo a\\^"b 100^% x^&y^|z'),
            (["echo", "(c)", "d^e", "<f>", "!"], "echo ^(c^) d^^e ^<f^> ^!"),
            (["x", ""], 'x ^"^"'),
        ):
            self.assertEqual(WindowsShell().line(words, "m"), line)

    def test_nothing_is_killed_by_a_command(self) -> None:
        self.assertEqual(WindowsShell().kill("m"), "")

    def test_what_cmd_can_t_be_given_is_refused(self) -> None:
        for words in (["a\nb"], ["a\rb"], ["a\0b"], ["x" * 9000]):
            with self.assertRaises(InvalidArgument):
                WindowsShell().line(words, "m")
