# SPDX-License-Identifier: Apache-2.0
"""User namespaces that are kept open, and mounts with their ids."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from infranetes_common.errors import FailedPrecondition
from infranetes_common.user_namespaces import IdRange, UserNamespace
from tests.harness.needs import needs_mounts
from tests.harness.tools import need
from vmserver.machine.id_mapped import id_mapped, keep_namespace
from vmserver.machine.mounts import mounts_below, unmount

USERS = UserNamespace(IdRange(200000, 65536), IdRange(300000, 10))


@needs_mounts
class IdMappedTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.base = Path(tempfile.mkdtemp(prefix="infranetes-ids-"))
        self.addCleanup(shutil.rmtree, self.base)
        self.addCleanup(self.unmount)
        self.namespace = self.base / "users" / "one"
        self.below = self.base / "mapped"

    def unmount(self) -> None:
        for mounted in reversed(mounts_below(self.base)):
            unmount(mounted.point)

    def sources(self) -> list[Path]:
        """Return two directories, each with a file of the directory's name."""
        found = [self.base / "a", self.base / "b"]
        for source in found:
            source.mkdir()
            (source / source.name).touch()
        os.chown(found[0] / "a", 7, 8)
        return found

    def test_a_namespace_is_kept_and_made_once(self) -> None:
        for _ in range(2):
            keep_namespace(USERS, self.namespace)
        self.assertEqual(len(mounts_below(self.base)), 1)
        read = "cat /proc/self/{}_map"
        for kind, expected in (("uid", "0 200000 65536"), ("gid", "0 300000 10")):
            said = subprocess.run(
                [need("nsenter"), f"--user={self.namespace}", "sh", "-c", read.format(kind)],
                capture_output=True, text=True, check=True,
            )  # fmt: skip
            self.assertEqual(said.stdout.split(), expected.split())

    def test_a_namespace_that_can_not_be_had_is_told_and_nothing_stays(self) -> None:
        impossible = UserNamespace(IdRange(2**32 - 1, 5), USERS.gids)
        error = self.assertRaises(FailedPrecondition, keep_namespace, impossible, self.namespace)
        self.assertIn("user namespace", str(error))
        self.assertEqual(mounts_below(self.base), [])
        keep_namespace(USERS, self.namespace)

    def test_directories_have_its_ids_while_the_context_is_open(self) -> None:
        keep_namespace(USERS, self.namespace)
        sources = self.sources()
        with id_mapped(sources, self.namespace, self.below) as [first, second]:
            found = (first / "a").stat()
            self.assertEqual((found.st_uid, found.st_gid), (200007, 300008))
            self.assertEqual((second / "b").stat().st_uid, 200000)
            self.assertEqual((sources[0] / "a").stat().st_uid, 7)
        self.assertFalse(self.below.exists())

    def test_what_a_killed_agent_has_left_is_replaced(self) -> None:
        keep_namespace(USERS, self.namespace)
        sources = self.sources()
        left = id_mapped(sources[1:], self.namespace, self.below)
        left.__enter__()
        with id_mapped(sources, self.namespace, self.below) as [first, _]:
            self.assertEqual(os.listdir(first), ["a"])
        self.assertEqual(len(mounts_below(self.base)), 1)

    def test_file_systems_whose_ids_the_kernel_can_not_map_are_named(self) -> None:
        keep_namespace(USERS, self.namespace)
        sources = [*self.sources(), Path("/proc/sys")]
        mapped = id_mapped(sources, self.namespace, self.below)
        error = self.assertRaises(FailedPrecondition, mapped.__enter__)
        self.assertIn("/proc/sys can't be mounted with the pod's ids", str(error))
        self.assertFalse(self.below.exists())
