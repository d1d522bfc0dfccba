# SPDX-License-Identifier: Apache-2.0
"""`keep` and `kept`, against the daemon's side over a real socket."""

from __future__ import annotations

import contextlib
import io
import json
from functools import partial
from typing import cast

from infranetes.control.kept import KeptCalls
from infranetes.ctl.cli import read
from infranetes.ctl.commands import COMMANDS
from infranetes.ctl.session import DONE, Session
from infranetes.pods.keeping import clones, states
from infranetes_common.concurrency import replace_file
from infranetes_common.errors import InvalidArgument
from infranetes_common.reactors import IReactor
from tests.infranetes.control.visit_case import VisitCase, reactor
from tests.infranetes.pods.fakes import FakeNode, box, pod
from tests.infranetes.pods.keeping import kept_case
from tests.infranetes.pods.keeping.keeper import keeping
from txgrpc import Code, GrpcError


class KeptTests(VisitCase):
    def make_world(self) -> FakeNode:
        for module in (states, clones):
            self.patch(module, "run_in_thread", kept_case.inline)
        # In the reactor, so nothing waits for a disk that other tests keep busy.
        self.patch(states, "replace_file", partial(replace_file, durable=False))
        self.patch(states, "sync_directory", lambda directory: None)
        world = kept_case.KeepingNode(self.directory / "kept")
        keeping(world.provider)
        self.keeping_world = world
        return world

    async def setUp(self) -> None:
        await super().setUp()
        world = self.keeping_world
        container = await world.containers.create(self.sandbox, box())
        await world.containers.start(container)
        clock = cast(IReactor, world.clock)
        await self.serve_control(KeptCalls(clock, world.node.inventory, world.states, world.keeper))

    async def ctl(self, *words: str) -> str:
        options = read(words)
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            session = Session(reactor, self.stub, options)
            self.assertEqual(await COMMANDS[options.command].run(session), DONE)
        return out.getvalue()

    async def refusal(self, *words: str) -> GrpcError:
        with self.assertRaises(GrpcError) as caught:
            await self.ctl(*words)
        error: GrpcError = caught.exception
        return error

    async def test_a_pod_is_kept_listed_and_removed(self) -> None:
        self.assertEqual(await self.ctl("kept"), "no pod is kept\n")
        said = await self.ctl("keep", "web", "--as", "warm")
        self.assertIn("default/warm: 0 MiB, pod default/web; its VM was stopped for 0.250 s of", said)
        table = await self.ctl("kept")
        self.assertRegex(table, r"default +warm +ready .* default/web")
        self.assertIn("1 kept state, 0 MiB", table)
        self.assertEqual(await self.ctl("kept", "-n", "other"), "no pod is kept\n")
        self.assertEqual(await self.ctl("kept", "-o", "name"), "default/warm\n")
        self.assertEqual(await self.ctl("kept", "remove", "warm"), "default/warm, 0 MiB, is removed\n")
        self.assertEqual(list(self.keeping_world.states), [])

    async def test_json_has_the_same(self) -> None:
        made = json.loads(await self.ctl("--json", "keep", "web", "--as", "warm"))
        self.assertEqual((made["sandbox_id"], made["name"]), (self.sandbox, "warm"))
        (listed,) = json.loads(await self.ctl("kept", "-o", "json"))["states"]
        self.assertEqual(listed["stage"], "ready")
        self.assertEqual(listed["kept_at"], 1_700_000_000.5)
        self.assertEqual([each["name"] for each in listed["containers"]], ["main"])
        (removed,) = json.loads(await self.ctl("kept", "remove", "default/warm", "--json"))["removed"]
        self.assertEqual(removed["id"], listed["id"])

    async def test_a_taken_name_is_refused_or_replaced(self) -> None:
        await self.ctl("keep", "web", "--as", "warm")
        self.assertEqual((await self.refusal("keep", "web", "--as", "warm")).code, Code.ALREADY_EXISTS)
        await self.ctl("keep", "web", "--as", "warm", "--replace")
        self.assertEqual(len(list(self.keeping_world.states)), 1)

    async def test_what_can_not_be_is_refused(self) -> None:
        for name in ("", "Warm", "a/b", "../x", "x" * 64, "-a"):
            self.assertEqual((await self.refusal("keep", "web", f"--as={name}")).code, Code.INVALID_ARGUMENT)
        self.assertEqual((await self.refusal("keep", "none", "--as", "a")).code, Code.NOT_FOUND)
        self.assertEqual((await self.refusal("kept", "remove", "none")).code, Code.NOT_FOUND)
        self.assertEqual((await self.refusal("kept", "remove", "x/none")).code, Code.NOT_FOUND)
        self.assertFalse((self.directory / "kept" / "states").exists())
        with self.assertRaises(InvalidArgument):
            await self.ctl("kept", "remove")

    async def test_a_name_of_several_namespaces_needs_one(self) -> None:
        world = self.keeping_world
        config = pod("other", "u2")
        config.metadata.namespace = "prod"
        sandbox = await world.sandboxes.run(config, "")
        await world.containers.start(await world.containers.create(sandbox, box()))
        await self.ctl("keep", "default/web", "--as", "warm")
        await self.ctl("keep", "prod/other", "--as", "warm")
        error = await self.refusal("kept", "remove", "warm")
        self.assertEqual(error.code, Code.INVALID_ARGUMENT)
        self.assertIn("default, prod", error.message)
        await self.ctl("kept", "remove", "-n", "prod", "warm")
        self.assertEqual([each.namespace for each in world.states], ["default"])

    async def test_if_one_name_is_wrong_nothing_is_removed(self) -> None:
        await self.ctl("keep", "web", "--as", "warm")
        await self.refusal("kept", "remove", "warm", "none")
        self.assertEqual(len(list(self.keeping_world.states)), 1)
