# SPDX-License-Identifier: Apache-2.0
"""The first file system is made in a file, and leaves nothing behind."""

from __future__ import annotations

import os

from twisted.trial.unittest import TestCase

from infranetes_common.errors import FailedPrecondition
from infranetes_common.reactors import IReactor, installed
from vmserver.prewarm.first_file_system import make_first_file_system
from vmserver.volumes import filesystems


class FirstFileSystemTests(TestCase):
    async def test_one_is_made_as_on_a_blank_volume_and_removed_again(self) -> None:
        made = []
        make = filesystems.make

        async def watching(reactor: IReactor, device: str, filesystem: str) -> None:
            await make(reactor, device, filesystem)
            made.append((device, filesystem, filesystems.begins_as(device, filesystem)))

        self.patch(filesystems, "make", watching)
        await make_first_file_system(installed())
        [(device, *rest)] = made
        self.assertEqual(rest, ["ext4", True])
        self.assertFalse(os.path.exists(device))

    async def test_a_machine_on_which_none_can_be_made_goes_on(self) -> None:
        paths = []

        async def failing(reactor: IReactor, device: str, filesystem: str) -> None:
            paths.append(device)
            raise FailedPrecondition("there is no such program")

        self.patch(filesystems, "make", failing)
        await make_first_file_system(installed())
        self.assertEqual([os.path.exists(path) for path in paths], [False])
