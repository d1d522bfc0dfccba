# SPDX-License-Identifier: Apache-2.0
"""The manual pages that debian/man_pages.py makes: all that there is is in them, and man takes them."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from infranetes import service as node
from infranetes.config import Config
from infranetes.ctl import cli as ctl
from infranetes.ctl.commands import COMMANDS
from infranetes.providers import registry
from infranetes_common.config_text import defaults
from tests.harness.needs import needs_programs
from vmserver import service as agent
from vmserver.config import Config as AgentConfig

TREE = Path(__file__).resolve().parents[2]
UTF8 = {**os.environ, "LC_ALL": "C.UTF-8"}


@cache
def made() -> dict[str, str]:
    """The pages by their files' names."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, str(TREE / "debian" / "man_pages.py"), directory]
        subprocess.run(command, check=True)
        return {file.name: file.read_text() for file in Path(directory).iterdir()}


class ManPageTests(SynchronousTestCase):
    def said(self, name: str) -> str:
        """A page's words, without the marks of hyphens."""
        return made()[name].replace("\\-", "-")

    def warnings(self, *command: str) -> None:
        for name, page in made().items():
            file = Path(self.mktemp())
            file.write_text(page)
            done = subprocess.run(
                [*command, str(file)], check=False, capture_output=True, text=True, env=UTF8
            )
            self.assertEqual((done.returncode, done.stderr), (0, ""), name)

    @needs_programs("groff")
    def test_groff_takes_them_without_a_warning(self) -> None:
        self.warnings("groff", "-ww", "-z", "-man", "-Kutf8")

    @needs_programs("man")
    def test_man_takes_them_without_a_warning(self) -> None:
        self.warnings("man", "--warnings", "--encoding=UTF-8", "-Tutf8", "-Z", "--local-file")

    def test_they_are_those_that_the_packages_install(self) -> None:
        installed = {
            Path(line).name
            for file in (TREE / "debian").glob("*.manpages")
            for line in file.read_text().splitlines()
        }
        self.assertEqual(installed, made().keys())

    def test_every_command_and_its_words(self) -> None:
        page = self.said("infranetes-ctl.1")
        for name, command in COMMANDS.items():
            self.assertIn(f"{command.part_of} {name}".strip(), page)
            self.assertIn(command.words, page)
        for flag in ("--json", "--config FILE", "--socket PATH", "--dry-run", "-w", "--trace ADDRESS:PORT"):
            self.assertIn(flag, page)
        self.assertIn("no daemon answers", page)
        self.assertTrue(ctl.parser().epilog)

    def test_every_command_of_guest_images(self) -> None:
        page = self.said("infranetes-guest.1")
        for words in ("build ", "show ", "cloud-disk ", "publish ", "images ", "--remove-older-than-days"):
            self.assertIn(words, page)

    def test_every_flag_of_the_daemons(self) -> None:
        for name, options in (("infranetes.8", node.Options), ("vmserver.8", agent.Options)):
            for flag, *_ in options.optParameters:
                self.assertIn(f"--{flag} VALUE", self.said(name))

    def test_every_key_with_its_default(self) -> None:
        wanted = {"infranetes.toml.5": [*defaults(Config)], "vmserver.toml.5": [*defaults(AgentConfig)]}
        for name in registry.names():
            cls = registry.settings_class(name)
            assert cls is not None
            wanted["infranetes.toml.5"] += defaults(cls)
        for page, settings in wanted.items():
            lines = self.said(page).splitlines()
            for each in settings:
                name = each.key.rpartition(".")[2]
                if each.key not in ("providers", "handlers", "machine_images"):
                    self.assertIn(f'.B "{name}"', lines, page)
        self.assertIn('Default: "/run/infranetes/infranetes.sock"', self.said("infranetes.toml.5"))
        self.assertIn("It has to be given.", self.said("infranetes.toml.5"))
        self.assertIn('.SS "[providers.oci]"', self.said("vmserver.toml.5"))
