# SPDX-License-Identifier: Apache-2.0
"""What is said of a container's files that can't be made or deleted."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from infranetes_common.errors import FailedPrecondition, ResourceExhausted
from infranetes_common.wire import cri
from infranetes_common.wire import vmserver as messages
from tests.harness.needs import needs_mounts
from vmserver.containers.oci import filesystems
from vmserver.containers.oci.container import OciContainer
from vmserver.containers.oci.record import OciRecord
from vmserver.machine.mounts import mounts_below, unmount


@needs_mounts
class FileSystemTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.top = Path(tempfile.mkdtemp(prefix="filesystems-"))
        self.addCleanup(shutil.rmtree, self.top)
        self.addCleanup(self.unmount_all)
        record = OciRecord(messages.ContainerState(id="c1"), cri.ContainerConfig())
        self.container = OciContainer(record, self.top / "containers" / "c1")

    def unmount_all(self) -> None:
        for one in reversed(mounts_below(self.top)):
            unmount(one.point)

    def failing(self, name: str, *numbers: int) -> None:
        """Let a function fail with each of these errors in turn, and then work."""
        real: Callable[..., object] = getattr(filesystems, name)
        left = list(numbers)

        def work(*args: object) -> object:
            if left:
                number = left.pop(0)
                raise OSError(number, os.strerror(number))
            return real(*args)

        self.patch(filesystems, name, work)

    def make(self) -> None:
        filesystems._thd_make(self.container, [], None)

    def delete(self) -> None:
        filesystems._thd_delete(self.container.directory)

    def test_of_an_image_without_layers_it_is_made_once_and_deleted_with_all_that_is_in_it(self) -> None:
        self.addCleanup(os.umask, os.umask(0o077))
        for _ in range(3):
            self.make()
        self.assertEqual([one.point for one in mounts_below(self.top)], [str(self.container.root)])
        self.assertEqual(self.container.root.stat().st_mode & 0o777, 0o755)
        (self.container.root / "file").touch()
        self.assertTrue((self.container.written / "file").exists())
        for _ in range(2):
            self.delete()
        self.assertEqual(os.listdir(self.top / "containers"), [])

    def test_what_can_not_be_made_says_whether_there_is_room(self) -> None:
        volume = self.top / "volumes" / "v"
        for name, make, at in (
            ("mount_rootfs", self.make, self.container.directory),
            ("mount_volume", lambda: filesystems._thd_mount_volume([], volume, None), volume),
        ):
            self.failing(name, errno.ENOSPC, errno.EIO)
            self.assertIn(str(at), str(self.assertRaises(ResourceExhausted, make)))
            self.assertIn(str(at), str(self.assertRaises(FailedPrecondition, make)))
            make()

    def test_what_can_not_be_deleted_says_whether_that_needs_room(self) -> None:
        self.make()
        self.failing("remove_tree", errno.ENOSPC, errno.EPERM)
        self.assertIn("No space", str(self.assertRaises(ResourceExhausted, self.delete)))
        self.assertIn("not permitted", str(self.assertRaises(FailedPrecondition, self.delete)))
        self.delete()
        self.assertFalse(self.container.directory.exists())

    def test_what_disappears_meanwhile_is_no_failure(self) -> None:
        self.make()
        self.failing("remove_tree", errno.ENOENT, errno.ENOENT)
        self.delete()
        self.assertFalse(self.container.directory.exists())
