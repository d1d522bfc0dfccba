# SPDX-License-Identifier: Apache-2.0
"""`vnc`: viewers over real sockets, by the control socket to a screen."""

from __future__ import annotations

import argparse
import io
import json
import os
import stat
from typing import Any

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.endpoints import TCP4ClientEndpoint, UNIXClientEndpoint

from infranetes.ctl.session import Session
from infranetes.ctl.viewers import vnc
from infranetes_common.byte_connection import ByteConnection, connected
from infranetes_common.concurrency import start
from infranetes_common.errors import FailedPrecondition, Unavailable
from tests.infranetes.control.screens import GREETING, ScreenCase
from tests.infranetes.control.visit_case import reactor
from tests.support.waiting import until
from txgrpc import Code, GrpcError


class VncCase(ScreenCase):
    async def setUp(self) -> None:
        await super().setUp()
        self.out, self.words = io.StringIO(), io.StringIO()
        self.patch(__import__("sys"), "stdout", self.out)
        self.patch(__import__("sys"), "stderr", self.words)

    def serve(self, **options: Any) -> Deferred[int]:
        """Run the command until the test ends."""
        given = {"pod": "web", "listen": 0, "unix": None, "json": True, **options}
        serving = start(vnc(Session(reactor, self.stub, argparse.Namespace(**given))))

        def end() -> Deferred[object]:
            serving.cancel()
            return serving.addErrback(lambda failure: failure.trap(CancelledError))

        self.addCleanup(end)
        return serving

    async def told(self) -> Any:
        """Return what it has printed."""
        await until(lambda: "\n" in self.out.getvalue(), "it listens")
        return json.loads(self.out.getvalue())

    async def viewer(self) -> ByteConnection:
        """Return a viewer that the screen has greeted."""
        endpoint = TCP4ClientEndpoint(reactor, "127.0.0.1", (await self.told())["port"])
        viewer = await connected(endpoint, "the relay")
        self.addCleanup(viewer.abort)
        self.assertEqual(await viewer.read(), GREETING)
        return viewer


class VncTests(VncCase):
    async def test_viewers_have_screen_and_keyboard_each(self) -> None:
        self.serve()
        first, second = await self.viewer(), await self.viewer()
        await first.write(b"a")
        await second.write(b"b")
        self.assertEqual((await first.read(), await second.read()), (b"a", b"b"))
        first.close()
        await until(lambda: self.screen.gone == 1, "the first is disconnected from the VM")
        await second.write(b"c")
        self.assertEqual(await second.read(), b"c")

    async def test_much_passes_unchanged(self) -> None:
        self.serve()
        viewer, sent = await self.viewer(), os.urandom(3_000_000)

        async def send() -> None:
            for at in range(0, len(sent), 50_000):
                await viewer.write(sent[at : at + 50_000])

        sending = start(send())
        shown = bytearray()
        while len(shown) < len(sent):
            shown += await viewer.read()
        await sending
        self.assertEqual(bytes(shown), sent)

    async def test_a_unix_socket_is_for_this_user_alone_and_gone_afterwards(self) -> None:
        path = self.directory / "viewers"
        serving = self.serve(unix=path)
        self.assertEqual((await self.told())["unix"], str(path))
        self.assertEqual(stat.S_IMODE(path.stat().st_mode), 0o600)
        viewer = await connected(UNIXClientEndpoint(reactor, str(path)), "the relay")
        self.assertEqual(await viewer.read(), GREETING)
        viewer.abort()
        await until(lambda: self.screen.gone == 1, "the viewer is gone")
        serving.cancel()
        await until(lambda: not path.exists(), "the socket is gone")

    async def test_it_says_how_to_connect(self) -> None:
        self.serve(json=False)
        await until(lambda: "user" in self.out.getvalue(), "it listens")
        self.assertRegex(self.out.getvalue(), r"VM .* of pod default/web; Ctrl-C")
        self.assertRegex(
            self.out.getvalue(), r"\nvncviewer 127\.0\.0\.1::[0-9]+\n.*every user of this machine"
        )

    async def test_a_vm_that_closes_the_connection_closes_the_viewers(self) -> None:
        self.serve()
        viewer = await self.viewer()
        await self.screen.connected[0].write(b"last")
        self.screen.connected[0].close()
        self.assertEqual(await viewer.read(), b"last")
        self.assertEqual(await viewer.read(), b"")
        await self.viewer()

    async def test_a_screen_that_can_not_be_had_now_ends_that_viewer_alone(self) -> None:
        self.serve()
        port = (await self.told())["port"]
        there = self.hypervisor.viewed
        self.hypervisor.viewed = UNIXClientEndpoint(reactor, "/nonexistent")
        viewer = await connected(TCP4ClientEndpoint(reactor, "127.0.0.1", port), "the relay")
        with self.assertRaises(Unavailable):  # it is reset, which viewers tell from a VM's end
            await viewer.read()
        await until(lambda: "a viewer was disconnected" in self.words.getvalue(), "it is told")
        self.hypervisor.viewed = there
        await self.viewer()


class RefusedTests(VncCase):
    async def test_before_anybody_connects_where_it_is_not_allowed(self) -> None:
        self.allowed = False
        with self.assertRaises(GrpcError) as refused:
            await self.serve()
        self.assertEqual(refused.exception.code, Code.PERMISSION_DENIED)
        self.assertEqual(self.out.getvalue(), "")

    async def test_as_soon_as_the_pod_is_gone(self) -> None:
        serving = self.serve()
        viewer = await self.viewer()
        await start(self.world.sandboxes.stop(self.sandbox))
        await start(self.world.sandboxes.remove(self.sandbox))
        viewer.close()
        port = (await self.told())["port"]
        await connected(TCP4ClientEndpoint(reactor, "127.0.0.1", port), "the relay")
        with self.assertRaises(GrpcError) as refused:
            await serving
        self.assertIn("gone", str(refused.exception.message))

    async def test_a_port_or_path_that_is_taken(self) -> None:
        self.serve()
        port = (await self.told())["port"]
        with self.assertRaises(FailedPrecondition) as refused:
            await self.serve(listen=port)
        self.assertIn(f"127.0.0.1:{port} can't be listened on", str(refused.exception))
        with self.assertRaises(FailedPrecondition) as refused:
            await self.serve(unix=self.directory / "none" / "socket")
        self.assertIn("--unix PATH", str(refused.exception))
