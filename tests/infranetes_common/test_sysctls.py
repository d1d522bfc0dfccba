# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import threading
from pathlib import Path

from twisted.internet.defer import Deferred
from twisted.trial.unittest import TestCase

from infranetes_common.errors import FailedPrecondition
from infranetes_common.reactors import installed
from infranetes_common.sysctls import set_sysctl

reactor = installed()


class SysctlTests(TestCase):
    async def test_another_value_is_written_and_the_same_one_is_not(self) -> None:
        path = Path(self.mktemp())
        path.write_text("0\n")
        await set_sysctl(reactor, path, "1")
        self.assertEqual(path.read_text(), "1")
        os.utime(path, (1, 1))
        await set_sysctl(reactor, path, "1")
        self.assertEqual(path.stat().st_mtime, 1)

    async def test_what_can_not_be_set_is_named(self) -> None:
        path = Path(self.mktemp())
        with self.assertRaises(FailedPrecondition) as caught:
            await set_sysctl(reactor, path, "1")
        self.assertIn(f"{path} can't be set to 1: No such file or directory", str(caught.exception))

    async def test_the_reactor_goes_on_while_the_kernel_waits_for_a_lock(self) -> None:
        path = Path(self.mktemp())
        os.mkfifo(path)
        setting = Deferred.fromCoroutine(set_sysctl(reactor, path, "1"))

        def hold() -> None:
            path.write_text("0\n")  # ends the read
            path.read_text()  # takes what is written

        holder = threading.Thread(target=hold)
        self.assertFalse(setting.called)
        holder.start()
        await setting
        holder.join()
