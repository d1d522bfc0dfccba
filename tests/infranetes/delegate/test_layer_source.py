# SPDX-License-Identifier: Apache-2.0
"""Which source of layers is used for which runtime."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from twisted.trial.unittest import TestCase

from infranetes.delegate.channel import Delegate
from infranetes.delegate.crio_content import PARTIAL, CrioContent
from infranetes.delegate.layer_source import OTHER, SourceByKind
from infranetes_common.concurrency import start
from infranetes_common.errors import FailedPrecondition, Unavailable
from infranetes_common.reactors import installed
from infranetes_common.wire import cri
from tests.support.delegate import FakeDelegate
from tests.txgrpc.support import socket_path
from txgrpc import Code, GrpcError

reactor = installed()

IMAGE = "sha256:" + "0" * 64


class SourceByKindTests(TestCase):
    """CRI-O is known here, and no other runtime."""

    async def setUp(self) -> None:
        self.theirs = FakeDelegate(socket_path(self))
        await self.theirs.start()
        self.addCleanup(self.theirs.down)
        delegate = Delegate(reactor, self.theirs.path)
        self.addCleanup(delegate.stop)
        directory = Path(tempfile.mkdtemp(prefix="sources-"))
        self.addCleanup(shutil.rmtree, directory)
        crio = CrioContent(reactor, delegate, directory / "tars", "linux/amd64")
        self.source = SourceByKind(delegate, {"cri-o": crio})
        await self.source.start()

    def is_a(self, name: str) -> None:
        """Make the delegate that runtime."""
        answer = cri.VersionResponse(runtime_name=name, runtime_version="1.36").SerializeToString()
        self.theirs.answers["Version"] = lambda _: answer

    async def test_the_runtime_is_asked_what_it_is_when_that_is_first_needed(self) -> None:
        self.is_a("cri-o")
        place = cri.FilesystemUsage(fs_id=cri.FilesystemIdentifier(mountpoint="/nowhere/zfs-images"))
        answer = cri.ImageFsInfoResponse(image_filesystems=[place]).SerializeToString()
        self.theirs.answers["ImageFsInfo"] = lambda _: answer
        error = await self.assertFailure(start(self.source.image(IMAGE)), FailedPrecondition)
        self.assertIn("storage_driver", str(error))
        self.assertIn("storage_driver", await self.source.unusable())
        self.assertEqual(self.source.discards, PARTIAL)

    async def test_of_one_that_is_not_known_there_are_no_vms(self) -> None:
        self.is_a("another")
        self.assertEqual(await self.source.unusable(), OTHER)
        self.assertEqual(self.source.discards, OTHER)
        for call in (self.source.image(IMAGE), self.source.config(IMAGE)):
            error = await self.assertFailure(start(call), FailedPrecondition)
            self.assertEqual(str(error), OTHER)

    async def test_one_that_does_not_say_is_asked_again(self) -> None:
        self.theirs.errors["Version"] = GrpcError(Code.UNAVAILABLE, "starting")
        await self.assertFailure(start(self.source.unusable()), Unavailable)
        self.theirs.errors.clear()
        self.theirs.answers["Version"] = lambda _: b"\xff"
        await self.assertFailure(start(self.source.image(IMAGE)), Unavailable)
        self.is_a("another")
        self.assertEqual(await self.source.unusable(), OTHER)
