# SPDX-License-Identifier: Apache-2.0
"""`checkpoint`, against the daemon's side over a real socket."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import tarfile
from pathlib import Path

from infranetes.control.checkpoints import CheckpointCalls
from infranetes.ctl.checkpoints import checkpoint
from infranetes.ctl.session import DONE, Session
from infranetes.pods.keeping.checkpoints import Checkpoints
from tests.infranetes.control.visit_case import VisitCase, reactor
from tests.infranetes.pods.fakes import FakeNode, pod
from tests.infranetes.pods.keeping.keeper import keeping
from txgrpc import Code, GrpcError


class CheckpointTests(VisitCase):
    async def setUp(self) -> None:
        await super().setUp()
        world = FakeNode()
        world.provider_ready()
        self.addCleanup(world.kill)
        keeping(world.provider)
        self.sandbox = await world.sandboxes.run(pod(), "")
        checkpoints = Checkpoints(reactor, self.directory / "work", world.node.providers, world.containers)
        await self.serve_control(CheckpointCalls(world.node.inventory, checkpoints))
        self.file = self.directory / "web.tar"

    async def made(self, file: Path, json: bool = False, pod: str = "web") -> str:
        options = argparse.Namespace(pod=pod, file=file, json=json)
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            self.assertEqual(await checkpoint(Session(reactor, self.stub, options)), DONE)
        return out.getvalue()

    async def refusal(self, file: Path, pod: str = "web") -> GrpcError:
        with self.assertRaises(GrpcError) as caught:
            await self.made(file, pod=pod)
        error: GrpcError = caught.exception
        return error

    async def test_the_file_is_written_and_described(self) -> None:
        out = await self.made(self.file)
        self.assertTrue(tarfile.is_tarfile(self.file))
        self.assertRegex(out, rf"^{self.file}: 0 MiB, pod default/web; its VM was stopped for 0.250 s of ")
        self.assertEqual((await self.refusal(self.file)).code, Code.ALREADY_EXISTS)

    async def test_json_has_the_same(self) -> None:
        told = json.loads(await self.made(self.file, json=True))
        self.assertEqual(told["sandbox_id"], self.sandbox)
        self.assertEqual(told["bytes"], self.file.stat().st_size)
        self.assertEqual((told["file"], told["pause_seconds"]), (str(self.file), 0.25))

    async def test_a_relative_path_is_of_this_directory(self) -> None:
        before = os.getcwd()
        os.chdir(self.directory)
        self.addCleanup(os.chdir, before)
        await self.made(Path("here.tar"))
        self.assertTrue((self.directory / "here.tar").exists())

    async def test_what_the_daemon_refuses_is_told(self) -> None:
        self.assertEqual((await self.refusal(self.file, pod="other")).code, Code.NOT_FOUND)
        nowhere = await self.refusal(self.directory / "none" / "x.tar")
        self.assertEqual(nowhere.code, Code.FAILED_PRECONDITION)
        self.assertFalse(self.file.exists())
