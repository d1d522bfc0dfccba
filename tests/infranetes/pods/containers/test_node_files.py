# SPDX-License-Identifier: Apache-2.0
"""What the agent is sent instead of names that exist on the node only."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from infranetes.pods.containers import node_files
from infranetes_common.concurrency import start
from infranetes_common.errors import FailedPrecondition, InvalidArgument, NotFound
from infranetes_common.wire import cri
from tests.infranetes.pods.fake_images import IMAGE, FakeImages
from tests.infranetes.pods.fakes import box

PROFILE = json.dumps({"defaultAction": "SCMP_ACT_ALLOW"})
_KIND = cri.SecurityProfile


def secured(**fields: Any) -> Any:
    context = cri.LinuxContainerSecurityContext(**fields)
    return box(linux=cri.LinuxContainerConfig(security_context=context))


class SameRequestTests(SynchronousTestCase):
    """kubelet builds a container's configuration anew for each call."""

    def asked(self, file: str, *variables: str, data: str = "/data") -> Any:
        config = cri.ContainerConfig()
        config.annotations["io.kubernetes.container.terminationMessagePath"] = "/dev/termination-log"
        config.mounts.add(container_path="/data", host_path=data)
        config.mounts.add(container_path="/dev/termination-log", host_path=f"/pods/uid/containers/{file}")
        for name in variables:
            config.envs.add(key=name, value=b"x")
        return config

    def test_another_file_for_the_termination_message_and_another_order_of_variables(self) -> None:
        self.assertTrue(
            node_files.same_request(self.asked("1b4f", "DNS", "WEB"), self.asked("99ac", "WEB", "DNS"))
        )

    def test_anything_else_is_another_request(self) -> None:
        first = self.asked("1b4f", "DNS")
        self.assertFalse(node_files.same_request(first, self.asked("1b4f", "DNS", "WEB")))
        self.assertFalse(node_files.same_request(first, self.asked("1b4f", "DNS", data="/other")))


class SeccompTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.file = Path(self.mktemp())

    def test_a_path_may_be_as_long_as_the_kernel_takes(self) -> None:
        longest = "/" + "x" * 4095
        local = _KIND(profile_type=_KIND.Localhost, localhost_ref=longest)
        self.assertEqual(node_files.seccomp_path(secured(seccomp=local)), longest)
        for wrong in (longest + "x", "relative", "/nul\0"):
            local = _KIND(profile_type=_KIND.Localhost, localhost_ref=wrong)
            self.assertRaises(InvalidArgument, node_files.seccomp_path, secured(seccomp=local))

    def test_only_localhost_is_a_path(self) -> None:
        local = _KIND(profile_type=_KIND.Localhost, localhost_ref="/p/x")
        self.assertEqual(node_files.seccomp_path(secured(seccomp=local)), "/p/x")
        local.localhost_ref = "localhost//p/x"
        self.assertEqual(node_files.seccomp_path(secured(seccomp=local)), "/p/x")
        self.assertEqual(node_files.seccomp_path(secured(seccomp_profile_path="localhost//p/x")), "/p/x")
        for config in (
            box(),
            secured(seccomp=_KIND(profile_type=_KIND.RuntimeDefault), seccomp_profile_path="localhost//p"),
            secured(seccomp_profile_path="runtime/default"),
        ):
            self.assertIsNone(node_files.seccomp_path(config))
        for wrong in ("", "profiles/x", "/x\0", "/" * 5000):
            config = secured(seccomp=_KIND(profile_type=_KIND.Localhost, localhost_ref=wrong))
            self.assertRaises(InvalidArgument, node_files.seccomp_path, config)

    def test_the_text_takes_the_place_of_the_path(self) -> None:
        self.file.write_text(PROFILE)
        config = secured(seccomp_profile_path=f"localhost/{self.file}", no_new_privs=True)
        sent = node_files.with_seccomp_profile(
            config, node_files.read_seccomp_profile(str(self.file))
        ).linux.security_context
        self.assertEqual((sent.seccomp.profile_type, sent.seccomp.localhost_ref), (_KIND.Localhost, PROFILE))
        self.assertEqual((sent.seccomp_profile_path, sent.no_new_privs), ("", True))
        self.assertFalse(config.linux.security_context.HasField("seccomp"))

    def test_a_profile_may_be_as_long_as_it_may_be(self) -> None:
        text = PROFILE.ljust(node_files.MAX_PROFILE_BYTES)
        self.file.write_text(text)
        self.assertEqual(node_files.read_seccomp_profile(str(self.file)), text)

    def test_what_is_no_profile_says_so(self) -> None:
        error = self.assertRaises(
            FailedPrecondition, node_files.read_seccomp_profile, "/nowhere/profile.json"
        )
        self.assertIn("/nowhere/profile.json is not on this node", str(error))
        for text, words in (
            ("{", "is no JSON"),
            ("[" * 100_000, "is no JSON"),
            ("[]", "no object"),
            ('{"defaultAction": 3}', "defaultAction"),
            ("x" * (node_files.MAX_PROFILE_BYTES + 1), "bytes"),
        ):
            self.file.write_text(text)
            error = self.assertRaises(InvalidArgument, node_files.read_seccomp_profile, str(self.file))
            self.assertIn(words, str(error))
        self.file.write_bytes(b'"\xff"')
        self.assertRaises(InvalidArgument, node_files.read_seccomp_profile, str(self.file))

    def test_what_is_no_file_is_not_waited_for(self) -> None:
        os.mkfifo(self.file)
        for path in (str(self.file), "/dev/zero"):
            error = self.assertRaises(InvalidArgument, node_files.read_seccomp_profile, path)
            self.assertIn("is no file", str(error))
        self.assertRaises(FailedPrecondition, node_files.read_seccomp_profile, "/")


class ImageTests(SynchronousTestCase):
    def test_images_are_named_by_their_ids(self) -> None:
        mounts = [
            cri.Mount(container_path="/a", host_path="/a"),
            cri.Mount(container_path="/b", image=cri.ImageSpec(image="busybox"), image_sub_path="x"),
        ]
        config = box(mounts=mounts)
        found = self.successResultOf(start(node_files.mounted_images(config, FakeImages())))
        self.assertEqual({index: image.id for index, image in found.items()}, {1: IMAGE})
        sent = node_files.with_image_ids(config, found).mounts[1]
        self.assertEqual((sent.image.image, sent.image_sub_path), (IMAGE, "x"))
        self.assertEqual(config.mounts[1].image.image, "busybox")

    def test_one_that_is_not_here_is_named_with_its_mount(self) -> None:
        config = box(mounts=[cri.Mount(container_path="/b", image=cri.ImageSpec(image="other"))])
        looking = start(node_files.mounted_images(config, FakeImages()))
        error = self.failureResultOf(looking, NotFound).value
        self.assertIn("config.mounts[0] at /b: image other is not on this node", str(error))


class TargetTests(SynchronousTestCase):
    def test_a_target_is_a_container_of_the_sandbox(self) -> None:
        target = cri.NamespaceOption(pid=cri.TARGET, target_id="c1")
        node_files.check_target_container(secured(namespace_options=target), {"c1"})
        node_files.check_target_container(box(), set())
        error = self.assertRaises(
            FailedPrecondition, node_files.check_target_container, secured(namespace_options=target), {"c2"}
        )
        self.assertIn("target_id 'c1': no container of this sandbox", str(error))
