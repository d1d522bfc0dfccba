# SPDX-License-Identifier: Apache-2.0
"""The completions that debian/completions.py makes, as the shells have them."""

from __future__ import annotations

import shlex
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from infranetes.ctl.commands import COMMANDS
from tests.docs.zsh import ALL, Zsh
from tests.harness.needs import needs_programs

TREE = Path(__file__).resolve().parents[2]


@cache
def made() -> dict[str, str]:
    """The files by shell and name."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, str(TREE / "debian" / "completions.py"), directory]
        subprocess.run(command, check=True)
        found = [file for file in Path(directory).rglob("*") if file.is_file()]
        return {str(file.relative_to(directory)): file.read_text() for file in found}


class BashTests(SynchronousTestCase):
    """What bash offers for the last of some words.

    :ivar names: those that infranetes-ctl says. :ivar asked: with what it was run last."""

    names: tuple[str, ...] = ()

    def offered(self, *words: str) -> set[str]:
        file, asked = Path(self.mktemp()), Path(self.mktemp())
        file.write_text(made()[f"bash/{words[0]}"])
        script = f"""
            set -u
            compopt() {{ :; }}  # which works while a person completes alone
            source {file}
            infranetes-ctl() {{ printf '%s\n' {shlex.join(self.names)}; printf '%s\n' "$@" >{asked}; }}
            COMP_WORDS=({shlex.join(words)}) COMP_CWORD={len(words) - 1}
            function=$(complete -p {words[0]} | sed 's/.* -F \\([^ ]*\\) .*/\\1/')
            "$function"
            printf '%s\\n' "${{COMPREPLY[@]}}"
        """
        done = subprocess.run(["bash", "-c", script], check=False, capture_output=True, text=True)
        self.assertEqual((done.returncode, done.stderr), (0, ""), script)
        self.asked = asked.read_text().splitlines() if asked.exists() else []
        return {*done.stdout.split()}

    def test_names_are_the_daemons(self) -> None:
        self.names = ("default/web", "web")
        for words, kind in (
            (("describe",), "pods"),
            (("get", "pods", "default/api"), "pods"),
            (("logs", "web"), "pods,containers"),
            (("ps",), "containers"),
            (("pods", "--namespace"), "namespaces"),
            (("explain",), "annotations"),
        ):
            self.assertIn("web", self.offered("infranetes-ctl", *words, "we"), words)
            self.assertEqual(self.asked, ["__complete", kind, "we", *words])

    def test_options_ask_nobody(self) -> None:
        self.names = ("--web",)
        self.assertNotIn("--web", self.offered("infranetes-ctl", "describe", "--"))
        self.offered("infranetes-ctl", "pool", "")
        self.assertEqual(self.asked, [])

    def test_every_command_and_the_shared_flags(self) -> None:
        alone = {name for name, each in COMMANDS.items() if each.alone}
        flags = {"--json", "--config", "--socket", "--version", "--help", "-h"}
        self.assertEqual(self.offered("infranetes-ctl", ""), alone | flags)
        self.assertEqual(self.offered("infranetes-ctl", "po"), {"pods", "policies", "pool"})

    def test_what_belongs_to_a_command_wherever_the_flags_are(self) -> None:
        for words in (("pool",), ("--json", "pool"), ("--socket", "/s", "pool", "--handler", "x")):
            self.assertEqual(self.offered("infranetes-ctl", *words, "d"), {"drain"}, words)
        self.assertEqual(self.offered("infranetes-ctl", "config", "check", "--js"), {"--json"})
        self.assertIn("--dry-run", self.offered("infranetes-ctl", "pool", "drain", "--"))
        self.assertNotIn("--watch", self.offered("infranetes-ctl", "pool", "drain", "--"))

    def test_files_where_files_are_due(self) -> None:
        directory = Path(self.mktemp()).absolute()
        directory.mkdir()
        (directory / "infranetes.toml").touch()
        path = str(directory / "infra")
        for words in (("config", "check"), ("--config",), ("pods", "--config")):
            self.assertEqual(
                self.offered("infranetes-ctl", *words, path), {str(directory / "infranetes.toml")}, words
            )
        self.assertEqual(self.offered("infranetes-ctl", "console", path), set())

    def test_values_that_a_flag_or_an_argument_may_have(self) -> None:
        self.assertEqual(
            self.offered("infranetes-guest", "build", "--containers", ""), {"both", "docker", "oci"}
        )
        self.assertLessEqual({"aws", "gcp", "vsphere"}, self.offered("infranetes-guest", "publish", ""))
        self.assertEqual(self.offered("infranetes-ctl", "sizes", "--cpu", ""), set())


@needs_programs("zsh")
class ZshTests(SynchronousTestCase):
    """What a zsh in a terminal makes of keys."""

    def typed(self, command: str, keys: str) -> list[str]:
        """The words that `command` was run with after these keys and Enter."""
        directory = Path(self.mktemp()).absolute()
        functions = directory / "functions"
        functions.mkdir(parents=True)
        for name in ("_infranetes-ctl", "_infranetes-guest"):
            (functions / name).write_text(made()[f"zsh/{name}"])
        return Zsh(directory, functions, command).typed(keys)

    def offered(self, command: str, *words: str) -> set[str]:
        """All that is offered for the last of some words; nothing leaves that as it is."""
        typed = self.typed(command, shlex.join(words[:-1]) + f" {words[-1]}{ALL}")
        before = len(words) - 1
        self.assertEqual(typed[:before], list(words[:-1]))
        return {*typed[before:]} - {words[-1]}

    def test_tab_completes_what_is_alone_and_goes_on_with_the_next_word(self) -> None:
        self.assertEqual(self.typed("infranetes-ctl", "desc\tweb"), ["describe", "web"])
        self.assertEqual(self.typed("infranetes-ctl", "pool d\t--dr\t"), ["pool", "drain", "--dry-run"])

    def test_a_misspelt_word_is_left_to_zshs_other_completers(self) -> None:
        self.assertEqual(self.typed("infranetes-ctl", "desribe\t"), ["describe"])

    def test_every_command_and_the_shared_flags(self) -> None:
        alone = {name for name, each in COMMANDS.items() if each.alone}
        flags = {"--json", "--config", "--socket", "--version", "--help", "-h"}
        self.assertEqual(self.offered("infranetes-ctl", ""), alone | flags)
        self.assertEqual(self.offered("infranetes-ctl", "po"), {"pods", "policies", "pool"})

    def test_what_belongs_to_a_command_wherever_the_flags_are(self) -> None:
        for words in (("pool",), ("--json", "pool"), ("--socket", "/s", "pool", "--handler", "x")):
            self.assertEqual(self.offered("infranetes-ctl", *words, "d"), {"drain"}, words)
        flags = self.offered("infranetes-ctl", "pool", "drain", "--")
        self.assertIn("--dry-run", flags)
        self.assertNotIn("--watch", flags)

    def test_files_where_files_are_due(self) -> None:
        directory = Path(self.mktemp()).absolute()
        directory.mkdir()
        (directory / "infranetes.toml").touch()
        path = str(directory / "infra")
        for words in (("config", "check"), ("--config",), ("pods", "--config")):
            keys = f"{shlex.join(words)} {path}\t"
            self.assertEqual(
                self.typed("infranetes-ctl", keys), [*words, str(directory / "infranetes.toml")], words
            )
        self.assertEqual(self.typed("infranetes-ctl", f"console {path}\t"), ["console", path])

    def test_values_that_a_flag_or_an_argument_may_have(self) -> None:
        self.assertEqual(
            self.offered("infranetes-guest", "build", "--containers", ""), {"both", "docker", "oci"}
        )
        self.assertLessEqual({"aws", "gcp", "vsphere"}, self.offered("infranetes-guest", "publish", ""))
        self.assertEqual(self.offered("infranetes-ctl", "sizes", "--cpu", ""), set())

    def test_the_same_is_offered(self) -> None:
        bash, zsh = made()["bash/infranetes-ctl"], made()["zsh/_infranetes-ctl"]
        self.assertTrue(zsh.startswith("#compdef infranetes-ctl\n"))
        lines = [line.strip() for line in bash.splitlines() if ") " in line]
        offered = [line.strip() for line in zsh.splitlines() if ") " in line]
        self.assertTrue(any("offered='" in line for line in lines))
        self.assertLessEqual({line for line in lines if "offered='" in line}, {*offered})
