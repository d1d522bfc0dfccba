"""What a container's configuration names on the node, and the agent gets instead."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from infranetes.pods import carried
from infranetes_common import cri
from infranetes_common.errors import FailedPrecondition, InvalidArgument, NotFound
from tests.infranetes.pods.fakes import IMAGE, FakeImages, box

PROFILE = json.dumps({"defaultAction": "SCMP_ACT_ALLOW"})
_KIND = cri.SecurityProfile


def secured(**fields: Any) -> Any:
    context = cri.LinuxContainerSecurityContext(**fields)
    return box(linux=cri.LinuxContainerConfig(security_context=context))


class SeccompTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.file = Path(self.mktemp())

    def test_only_localhost_is_a_path(self) -> None:
        local = _KIND(profile_type=_KIND.Localhost, localhost_ref="/p/x")
        self.assertEqual(carried.seccomp_path(secured(seccomp=local)), "/p/x")
        self.assertEqual(carried.seccomp_path(secured(seccomp_profile_path="localhost//p/x")), "/p/x")
        for config in (
            box(),
            secured(seccomp=_KIND(profile_type=_KIND.RuntimeDefault), seccomp_profile_path="localhost//p"),
            secured(seccomp_profile_path="runtime/default"),
        ):
            self.assertEqual(carried.seccomp_path(config), "")
        for wrong in ("", "profiles/x", "/x\0", "/" * 5000):
            config = secured(seccomp=_KIND(profile_type=_KIND.Localhost, localhost_ref=wrong))
            self.assertRaises(InvalidArgument, carried.seccomp_path, config)

    def test_the_text_takes_the_place_of_the_path(self) -> None:
        self.file.write_text(PROFILE)
        config = secured(seccomp_profile_path=f"localhost/{self.file}", no_new_privs=True)
        sent = carried.with_profile(config, carried.read_profile(str(self.file))).linux.security_context
        self.assertEqual((sent.seccomp.profile_type, sent.seccomp.localhost_ref), (_KIND.Localhost, PROFILE))
        self.assertEqual((sent.seccomp_profile_path, sent.no_new_privs), ("", True))
        self.assertFalse(config.linux.security_context.HasField("seccomp"))

    def test_what_is_no_profile_says_so(self) -> None:
        error = self.assertRaises(FailedPrecondition, carried.read_profile, "/nowhere/profile.json")
        self.assertIn("/nowhere/profile.json is not on this node", str(error))
        for text, words in (
            ("{", "is no JSON"),
            ("[" * 100_000, "is no JSON"),
            ("[]", "no object"),
            ('{"defaultAction": 3}', "defaultAction"),
            ("x" * (carried.MAX_PROFILE_BYTES + 1), "bytes"),
        ):
            self.file.write_text(text)
            error = self.assertRaises(InvalidArgument, carried.read_profile, str(self.file))
            self.assertIn(words, str(error))
        self.file.write_bytes(b'"\xff"')
        self.assertRaises(InvalidArgument, carried.read_profile, str(self.file))

    def test_what_is_no_file_is_not_waited_for(self) -> None:
        os.mkfifo(self.file)
        for path in (str(self.file), "/dev/zero"):
            error = self.assertRaises(InvalidArgument, carried.read_profile, path)
            self.assertIn("is no file", str(error))
        self.assertRaises(FailedPrecondition, carried.read_profile, "/")


class ImageTests(SynchronousTestCase):
    def test_images_are_named_by_their_ids(self) -> None:
        mounts = [
            cri.Mount(container_path="/a", host_path="/a"),
            cri.Mount(container_path="/b", image=cri.ImageSpec(image="busybox"), image_sub_path="x"),
        ]
        config = box(mounts=mounts)
        found = carried.mounted_images(config, FakeImages())
        self.assertEqual({index: image.id for index, image in found.items()}, {1: IMAGE})
        sent = carried.with_images(config, found).mounts[1]
        self.assertEqual((sent.image.image, sent.image_sub_path), (IMAGE, "x"))
        self.assertEqual(config.mounts[1].image.image, "busybox")

    def test_one_that_is_not_here_is_named_with_its_mount(self) -> None:
        config = box(mounts=[cri.Mount(container_path="/b", image=cri.ImageSpec(image="other"))])
        error = self.assertRaises(NotFound, carried.mounted_images, config, FakeImages())
        self.assertIn("config.mounts[0] at /b: image other is not on this node", str(error))


class TargetTests(SynchronousTestCase):
    def test_a_target_is_a_container_of_the_sandbox(self) -> None:
        target = cri.NamespaceOption(pid=cri.TARGET, target_id="c1")
        carried.check_target(secured(namespace_options=target), {"c1"})
        carried.check_target(box(), set())
        error = self.assertRaises(
            FailedPrecondition, carried.check_target, secured(namespace_options=target), {"c2"}
        )
        self.assertIn("target_id 'c1': no container of this sandbox", str(error))
