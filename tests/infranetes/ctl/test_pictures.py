# SPDX-License-Identifier: Apache-2.0
"""`screenshot`, against the daemon's side over a real socket."""

from __future__ import annotations

import argparse
import base64
import contextlib
import io
import json
import os
import stat
from pathlib import Path

from infranetes.ctl import pictures
from infranetes.ctl.pictures import screenshot
from infranetes.ctl.session import DONE, Session
from infranetes_common.errors import InfranetesError, InvalidArgument
from tests.infranetes.control.screens import ScreenCase, png
from tests.infranetes.control.visit_case import reactor
from txgrpc import GrpcError


class ScreenshotTests(ScreenCase):
    async def setUp(self) -> None:
        await super().setUp()
        self.hypervisor.picture = png(5, 4, filler=200_000)
        self.file = self.directory / "web.png"

    async def shot(self, output: Path | None, json: bool = False, pod: str = "web") -> tuple[str, str]:
        """Return what is written to standard output and standard error."""
        options = argparse.Namespace(pod=pod, output=output, json=json)
        out, words = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(words):
            self.assertEqual(await screenshot(Session(reactor, self.stub, options)), DONE)
        return out.getvalue(), words.getvalue()

    async def test_a_file_is_written_or_replaced_for_its_owner_alone(self) -> None:
        self.file.write_text("before")
        self.file.chmod(0o644)
        out, words = await self.shot(self.file)
        self.assertEqual(self.file.read_bytes(), self.hypervisor.picture)
        self.assertEqual(stat.S_IMODE(self.file.stat().st_mode), 0o600)
        self.assertEqual(out, "")
        self.assertRegex(words, "web.png: 5 x 4, VM .* of pod default/web")

    async def test_standard_output_gets_the_picture_and_nothing_else(self) -> None:
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        self.hypervisor.picture = png(5, 4)
        self.patch(pictures, "STDOUT", writing)
        self.assertEqual(await self.shot(None), ("", ""))
        os.close(writing)
        with open(reading, "rb") as file:
            self.assertEqual(file.read(), self.hypervisor.picture)

    async def test_a_terminal_gets_no_picture(self) -> None:
        leader, terminal = os.openpty()
        self.addCleanup(os.close, leader)
        self.addCleanup(os.close, terminal)
        self.patch(pictures, "STDOUT", terminal)
        with self.assertRaises(InvalidArgument) as refused:
            await self.shot(None)
        self.assertIn("--output FILE", str(refused.exception))

    async def test_json_says_what_it_is_and_where(self) -> None:
        document = json.loads((await self.shot(self.file, json=True))[0])
        self.assertEqual((document["width"], document["height"], document["png"]), (5, 4, None))
        self.assertEqual((document["file"], document["name"]), (str(self.file), "web"))
        self.assertEqual(document["bytes"], self.file.stat().st_size)
        document = json.loads((await self.shot(None, json=True))[0])
        self.assertEqual(base64.b64decode(document["png"]), self.hypervisor.picture)

    async def test_what_can_not_be_written_is_said(self) -> None:
        with self.assertRaises(InfranetesError) as refused:
            await self.shot(self.directory / "none" / "web.png")
        self.assertIn("can't be written: No such file", str(refused.exception))

    async def test_without_a_picture_no_file_is_touched(self) -> None:
        self.file.write_text("before")
        self.hypervisor.picture = None
        with self.assertRaises(GrpcError):
            await self.shot(self.file)
        self.assertEqual(self.file.read_text(), "before")
