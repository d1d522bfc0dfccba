# SPDX-License-Identifier: Apache-2.0
"""Files that are replaced whole or not at all."""

from __future__ import annotations

import errno
import os
import signal
import stat
from pathlib import Path
from unittest import mock

from twisted.trial.unittest import SynchronousTestCase

from infranetes_common.concurrency import lock_file, replace_file


class ReplaceFileTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.directory = Path(self.mktemp())
        self.directory.mkdir()
        self.path = self.directory / "record.json"

    def names(self) -> list[str]:
        return sorted(each.name for each in self.directory.iterdir())

    def mode(self) -> int:
        return stat.S_IMODE(self.path.stat().st_mode)

    def test_a_new_file(self) -> None:
        replace_file(self.path, b"one")
        self.assertEqual(
            (self.path.read_bytes(), self.mode(), self.names()), (b"one", 0o600, ["record.json"])
        )

    def test_an_old_one_with_another_mode_and_text(self) -> None:
        replace_file(self.path, "one")
        umask = os.umask(0o077)
        self.addCleanup(os.umask, umask)
        replace_file(self.path, "zwölf", mode=0o644)
        self.assertEqual((self.path.read_text("utf-8"), self.mode()), ("zwölf", 0o644))

    def test_what_a_killed_process_left_is_overwritten(self) -> None:
        (self.directory / "record.json.new").write_bytes(b"much longer than what comes")
        replace_file(self.path, b"one")
        self.assertEqual((self.path.read_bytes(), self.names()), (b"one", ["record.json"]))

    def test_a_link_in_its_place_is_not_followed(self) -> None:
        outside = Path(self.mktemp())
        outside.write_bytes(b"outside")
        (self.directory / "record.json.new").symlink_to(outside.absolute())
        self.path.symlink_to(outside.absolute())
        replace_file(self.path, b"one")
        self.assertEqual((outside.read_bytes(), self.path.read_bytes()), (b"outside", b"one"))
        self.assertFalse(self.path.is_symlink())

    def test_nothing_is_left_of_a_failure_at_any_step(self) -> None:
        replace_file(self.path, b"one")
        for step in ("os.fchmod", "os.fsync", "pathlib.Path.replace"):
            failing = mock.patch(step, side_effect=OSError(errno.ENOSPC, "full"))
            with failing, self.assertRaises(OSError):
                replace_file(self.path, b"two")
            self.assertEqual((self.path.read_bytes(), self.names()), (b"one", ["record.json"]), step)

    def test_the_content_is_synced_before_and_the_directory_after_the_rename(self) -> None:
        steps: list[str] = []
        sync, rename = os.fsync, Path.replace

        def fsync(descriptor: int) -> None:
            steps.append("directory" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
            sync(descriptor)

        def replace(path: Path, target: Path) -> Path:
            steps.append("rename")
            return rename(path, target)

        with mock.patch("os.fsync", fsync), mock.patch("pathlib.Path.replace", replace):
            replace_file(self.path, b"one")
        self.assertEqual(steps, ["file", "rename", "directory"])

    def test_a_locked_file_is_held_until_its_descriptor_is_closed(self) -> None:
        path = self.path.with_name("lock")
        held = lock_file(path)
        before = len(os.listdir("/proc/self/fd"))
        self.assertRaises(BlockingIOError, lock_file, path)
        self.assertEqual(len(os.listdir("/proc/self/fd")), before)
        os.close(held)
        os.close(lock_file(path))

    def test_what_need_not_be_durable_is_not_synced(self) -> None:
        def fsync(descriptor: int) -> None:
            raise AssertionError("a disk was waited for")

        self.patch(os, "fsync", fsync)
        replace_file(self.path, "new", durable=False)
        self.assertEqual(self.path.read_text(), "new")

    def test_a_process_that_is_killed_at_any_step_leaves_the_old_or_the_new_one(self) -> None:
        for step, content in (("os.fsync", b"one"), ("pathlib.Path.replace", b"one"),
                              ("infranetes_common.concurrency.files.sync_directory", b"two")):  # fmt: skip
            replace_file(self.path, b"one")
            child = os.fork()
            if not child:
                with mock.patch(step, side_effect=lambda *_: os.kill(os.getpid(), signal.SIGKILL)):
                    replace_file(self.path, b"two")
                os._exit(1)
            _, status = os.waitpid(child, 0)
            self.assertEqual(os.WTERMSIG(status), signal.SIGKILL)
            self.assertEqual(self.path.read_bytes(), content, step)
        replace_file(self.path, b"three")
        self.assertEqual(self.names(), ["record.json"])
