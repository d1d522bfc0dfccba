# SPDX-License-Identifier: Apache-2.0
"""The node's AppArmor profiles are loaded, with a script in place of apparmor_parser."""

from __future__ import annotations

from pathlib import Path

from twisted.internet.defer import Deferred
from twisted.trial.unittest import TestCase

from infranetes_common.errors import FailedPrecondition, InvalidArgument
from infranetes_common.reactors import installed
from vmserver.containers.apparmor import MAX_POLICY_BYTES, ProfileLoader

# Like apparmor_parser, it adds the names of profiles to the kernel's list.
PARSER = r"""#!/bin/sh
echo "$@" >>{directory}/asked
policy=$(cat)
case "$policy" in *broken*) echo "syntax error" >&2; exit 1;; esac
echo "$policy" | sed -nE 's/^profile ([^ ]+).*/\1 (enforce)/p' >>{directory}/profiles
"""


class ProfilesTests(TestCase):
    def setUp(self) -> None:
        self.directory = Path(self.mktemp()).absolute()
        self.directory.mkdir()
        parser = self.directory / "apparmor_parser"
        parser.write_text(PARSER.replace("{directory}", str(self.directory)))
        parser.chmod(0o755)
        self.listed = self.directory / "profiles"
        self.listed.write_text("docker-default (enforce)\n")
        self.profiles = ProfileLoader(installed(), self.listed, str(parser))

    def load(self, reference: str) -> Deferred[None]:
        return Deferred.fromCoroutine(self.profiles.load(reference))

    async def refused(self, reference: str, how: type[Exception]) -> str:
        """Return the error's message."""
        try:
            await self.load(reference)
        except how as error:
            return str(error)
        self.fail("it was loaded")
        return ""

    def asked(self) -> list[str]:
        return (self.directory / "asked").read_text().splitlines()

    async def test_a_profile_is_loaded_once_for_the_same_file(self) -> None:
        for _ in range(2):
            await self.load("web\nprofile web flags=(attach_disconnected) {\n}\n")
        self.assertEqual(self.asked(), ["--replace"])
        await self.load("web\nprofile web {\n}\n")
        self.assertEqual(len(self.asked()), 2)

    async def test_a_file_without_the_profile_is_refused(self) -> None:
        said = await self.refused("web\nprofile other {\n}\n", InvalidArgument)
        self.assertIn("no profile web", said)

    async def test_the_parsers_message_is_in_the_error(self) -> None:
        for _ in range(2):  # the failure is not remembered as a load
            said = await self.refused("web\nprofile web { broken }\n", InvalidArgument)
            self.assertIn("syntax error", said)

    async def test_a_machine_without_apparmor_says_so(self) -> None:
        self.listed.unlink()
        said = await self.refused("web\nprofile web {}\n", FailedPrecondition)
        self.assertIn("no AppArmor", said)

    async def test_what_comes_from_the_wire_is_bounded(self) -> None:
        long = "web\n" + "x" * (MAX_POLICY_BYTES + 1)
        for reference in ("", "web", "we b\nprofile", "\nprofile", "w" * 300 + "\nx", long):
            await self.refused(reference, InvalidArgument)
