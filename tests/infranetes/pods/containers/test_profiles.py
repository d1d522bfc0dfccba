# SPDX-License-Identifier: Apache-2.0
"""The VM gets the node's profiles of seccomp and AppArmor in place of their names."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from infranetes.pods.containers.profiles import SecurityProfiles
from infranetes_common.concurrency import start
from infranetes_common.errors import FailedPrecondition
from infranetes_common.wire import cri
from tests.infranetes.pods.fakes import box
from tests.support.inline_threads import InlineThreads

SECCOMP = '{"defaultAction": "SCMP_ACT_ALLOW"}'
APPARMOR = "profile k8s-web flags=(attach_disconnected) {\n  file,\n}\n"


class SecurityProfilesTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="infranetes-"))
        self.addCleanup(shutil.rmtree, self.directory)
        self.profiles = SecurityProfiles(InlineThreads().reactor, self.directory)

    def put_into(self, config: cri.ContainerConfig) -> cri.LinuxContainerSecurityContext:
        sent = self.successResultOf(start(self.profiles.put_into(config)))
        return sent.linux.security_context

    def test_their_contents_are_sent_and_the_configuration_of_the_node_stays(self) -> None:
        seccomp = self.directory / "seccomp.json"
        seccomp.write_text(SECCOMP)
        (self.directory / "web").write_text(APPARMOR)
        config = box()
        context = config.linux.security_context
        context.seccomp.profile_type = context.apparmor.profile_type = cri.SecurityProfile.Localhost
        context.seccomp.localhost_ref, context.apparmor.localhost_ref = f"localhost/{seccomp}", "k8s-web"
        before = config.SerializeToString(deterministic=True)
        sent = self.put_into(config)
        self.assertEqual(sent.seccomp.localhost_ref, SECCOMP)
        self.assertEqual(sent.apparmor.localhost_ref, f"k8s-web\n{APPARMOR}")
        self.assertEqual(config.SerializeToString(deterministic=True), before)

    def test_a_profile_that_the_node_lacks_is_named(self) -> None:
        config = box()
        config.linux.security_context.apparmor_profile = "localhost/absent"
        failure = self.failureResultOf(start(self.profiles.put_into(config)), FailedPrecondition)
        self.assertIn("absent", str(failure.value))

    def test_a_container_that_names_none_is_sent_as_it_is(self) -> None:
        self.assertEqual(self.put_into(box()), cri.LinuxContainerSecurityContext())
