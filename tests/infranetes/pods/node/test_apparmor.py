# SPDX-License-Identifier: Apache-2.0
"""The node's AppArmor profiles are found by name in its files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from infranetes.pods.node import apparmor
from infranetes_common.errors import FailedPrecondition, InvalidArgument
from infranetes_common.wire import cri

TEXT = """\
#include <tunables/global>
# profile commented {
profile deny-write flags=(attach_disconnected) {
  deny /** w,
}
profile "audit write" {
}
/usr/bin/man {
}
"""


def config(**fields: Any) -> cri.ContainerConfig:
    context = cri.LinuxContainerSecurityContext(**fields)
    return cri.ContainerConfig(linux=cri.LinuxContainerConfig(security_context=context))


def local(reference: str) -> cri.SecurityProfile:
    return cri.SecurityProfile(profile_type=cri.SecurityProfile.Localhost, localhost_ref=reference)


class NameTests(SynchronousTestCase):
    def test_the_field_of_today_is_before_the_old_one(self) -> None:
        for fields, expected in (
            ({}, None),
            ({"apparmor_profile": "runtime/default"}, None),
            ({"apparmor_profile": "localhost/old"}, "old"),
            ({"apparmor": local("new")}, "new"),
            ({"apparmor": local("localhost/new"), "apparmor_profile": "localhost/old"}, "new"),
            ({"apparmor": cri.SecurityProfile(), "apparmor_profile": "localhost/old"}, None),
        ):
            self.assertEqual(apparmor.profile_name(config(**fields)), expected)

    def test_what_is_no_name_is_refused(self) -> None:
        for reference in ("", "a\nb", "a b", "x" * 256):
            self.assertRaises(InvalidArgument, apparmor.profile_name, config(apparmor=local(reference)))


class FindTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.directory = Path(self.mktemp())
        self.directory.mkdir()
        (self.directory / "some").write_text(TEXT)

    def test_the_file_that_defines_it_is_found(self) -> None:
        for name in ("deny-write", "/usr/bin/man"):
            self.assertEqual(apparmor.find_profile(self.directory, name), TEXT)

    def test_what_is_not_defined_is_not_found(self) -> None:
        for name in ("deny", "commented", "write", ".*", "flags=(attach_disconnected)"):
            said = str(self.assertRaises(FailedPrecondition, apparmor.find_profile, self.directory, name))
            self.assertIn(str(self.directory), said)

    def test_what_is_no_file_is_passed_over(self) -> None:
        os.mkfifo(self.directory / "a pipe")
        (self.directory / "abstractions").mkdir()
        (self.directory / "large").write_text("profile large {\n" + "#" * apparmor.MAX_BYTES)
        (self.directory / "broken").symlink_to("nowhere")
        self.assertEqual(apparmor.find_profile(self.directory, "deny-write"), TEXT)
        self.assertRaises(FailedPrecondition, apparmor.find_profile, self.directory, "large")
        self.assertRaises(FailedPrecondition, apparmor.find_profile, self.directory / "none", "deny-write")

    def test_the_agent_gets_name_and_file_in_one(self) -> None:
        asked = config(apparmor_profile="localhost/deny-write")
        sent = apparmor.with_profile(asked, "deny-write", TEXT).linux.security_context
        self.assertEqual((sent.apparmor_profile, sent.apparmor.localhost_ref), ("", f"deny-write\n{TEXT}"))
        self.assertEqual(asked.linux.security_context.apparmor_profile, "localhost/deny-write")
