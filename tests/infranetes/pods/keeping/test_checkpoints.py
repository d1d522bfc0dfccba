# SPDX-License-Identifier: Apache-2.0
"""CheckpointContainer over a provider that keeps VMs, and its failures."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

from twisted.internet.defer import CancelledError, Deferred
from twisted.trial.unittest import TestCase

from infranetes.cri.checkpoints import CheckpointCalls
from infranetes.pods.keeping.checkpoints import Checkpoints
from infranetes_common.concurrency import start
from infranetes_common.errors import (
    AlreadyExists,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    Unavailable,
    Unimplemented,
)
from infranetes_common.reactors import installed
from infranetes_common.wire import cri
from tests.infranetes.cri.support import NO_CALL
from tests.infranetes.pods.fakes import FakeNode, box
from tests.infranetes.pods.fakes import pod as pod_config
from tests.infranetes.pods.keeping.keeper import keeping
from tests.support.failures import FailureAssertions

reactor = installed()


class CheckpointTests(FailureAssertions, TestCase):
    def setUp(self) -> None:
        self.world = FakeNode()
        self.world.provider_ready()
        self.addCleanup(self.world.kill)
        self.keeper = keeping(self.world.provider)
        self.directory = Path(self.mktemp()).absolute()
        self.directory.mkdir(parents=True)
        self.path = self.directory / "made.tar"
        self.checkpoints = Checkpoints(
            reactor, self.directory / "work", self.world.node.providers, self.world.containers
        )
        self.calls = CheckpointCalls(self.checkpoints)

    async def container(self, started: bool = True) -> str:
        sandbox = await self.world.sandboxes.run(pod_config(), "")
        container = await self.world.containers.create(sandbox, box())
        if started:
            await self.world.containers.start(container)
        return str(container)

    async def ask(self, container: str, location: object = None, timeout: int = 0) -> None:
        request = cri.CheckpointContainerRequest(
            container_id=container, location=str(location or self.path), timeout=timeout
        )
        await self.calls.CheckpointContainer(request, NO_CALL)

    def assert_nothing_left(self) -> None:
        work = self.directory / "work"
        self.assertEqual(list(work.iterdir()) if work.exists() else [], [])
        self.assertFalse(self.path.exists())

    async def test_the_archive_has_what_kubelet_looks_for_and_a_manifest(self) -> None:
        container = await self.container()
        await self.ask(container)
        with tarfile.open(self.path) as tar:
            content = {each.name: (tar.extractfile(each) or b"") for each in tar}
            files = {name: file.read() for name, file in content.items() if not isinstance(file, bytes)}
        self.assertEqual(files["checkpoint/memory"], b"m" * 1000)
        manifest = json.loads(files["checkpoint/inventory.img"])
        self.assertEqual(manifest["format"], 1)
        self.assertEqual(manifest["takenAt"], "2023-11-14T22:13:20.500Z")
        self.assertEqual(manifest["pauseSeconds"], 0.25)
        self.assertEqual(manifest["machine"], {"hypervisor": "QEMU 7.2"})
        self.assertEqual([each["id"] for each in manifest["containers"]], [container])
        self.assertEqual(
            set(manifest["files"]), {"config.dump", "spec.dump", "checkpoint/memory", "checkpoint/disk.qcow2"}
        )
        self.assertEqual(manifest["files"]["checkpoint/memory"]["bytes"], 1000)
        dump, spec = json.loads(files["config.dump"]), json.loads(files["spec.dump"])
        self.assertEqual((dump["id"], dump["runtime"]), (container, "infranetes"))
        self.assertEqual(spec["annotations"]["io.kubernetes.cri.sandbox-name"], "web")
        self.path.unlink()
        self.assert_nothing_left()
        self.assertEqual(len(self.keeper.asked), 1)

    async def test_what_can_not_be_is_refused_before_the_vm_is_asked(self) -> None:
        container = await self.container()
        for _ in range(2):
            await self.fails(NotFound, self.ask("none"))
            for location in ("made.tar", "/a/../b", "/"):
                await self.fails(InvalidArgument, self.ask(container, location))
            await self.fails(InvalidArgument, self.ask(container, timeout=-1))
            await self.fails(FailedPrecondition, self.ask(container, self.directory / "none" / "x.tar"))
        with self.assertRaises(InvalidArgument):
            await self.calls.CheckpointContainer(
                cri.CheckpointContainerRequest(container_id=container), NO_CALL
            )
        self.path.touch()
        await self.fails(AlreadyExists, self.ask(container))
        self.path.unlink()
        self.assertEqual(self.keeper.asked, [])
        self.assert_nothing_left()

    async def test_only_containers_that_run_are_checkpointed(self) -> None:
        container = await self.container(started=False)
        await self.fails(FailedPrecondition, self.ask(container))
        await self.world.containers.start(container)
        await self.world.containers.stop(container, 0)
        await self.fails(FailedPrecondition, self.ask(container))
        self.assertEqual(self.keeper.asked, [])

    async def test_a_failure_leaves_nothing(self) -> None:
        container = await self.container()
        for error in (Unavailable("the VM has ended"), FailedPrecondition("it has volumes")):
            self.keeper.error = error
            for _ in range(2):
                await self.fails(type(error), self.ask(container))
                self.assert_nothing_left()
        self.keeper.error = None
        self.keeper.before = self.path.touch  # somebody else takes the name meanwhile
        await self.fails(AlreadyExists, self.ask(container))
        self.path.unlink()
        self.assert_nothing_left()

    async def test_one_that_takes_too_long_or_is_cancelled_is_ended(self) -> None:
        container = await self.container()
        self.keeper.waits = True
        await self.fails(DeadlineExceeded, self.checkpoints.checkpoint(container, str(self.path), 1.0))
        self.assertEqual(self.keeper.cancelled, 1)
        self.assert_nothing_left()
        call = start(self.ask(container))
        while len(self.keeper.asked) < 2:
            await _turn()
        call.cancel()
        await self.assertFailure(call, CancelledError)
        self.assertEqual(self.keeper.cancelled, 2)
        while any((self.directory / "work").iterdir()):
            await _turn()
        self.assert_nothing_left()

    async def test_what_a_killed_daemon_has_left_goes(self) -> None:
        (self.directory / "work" / "0123").mkdir(parents=True)
        (self.directory / "work" / "0123" / "memory").write_bytes(b"secret")
        for _ in range(2):
            await self.checkpoints.start()
        self.assert_nothing_left()

    async def test_a_pod_is_checkpointed_without_naming_a_container(self) -> None:
        container = await self.container()
        sandbox = self.world.containers.lookup(container).sandbox
        made = await self.checkpoints.checkpoint_pod(sandbox, str(self.path), 60.0)
        self.assertEqual((made.size, made.pause_seconds), (self.path.stat().st_size, 0.25))
        with tarfile.open(self.path) as tar:
            self.assertEqual(
                tar.getnames(), ["checkpoint/memory", "checkpoint/disk.qcow2", "checkpoint/inventory.img"]
            )
        await self.fails(AlreadyExists, self.checkpoints.checkpoint_pod(sandbox, str(self.path), 60.0))
        self.path.unlink()
        await self.world.sandboxes.stop(sandbox.id)
        await self.fails(FailedPrecondition, self.checkpoints.checkpoint_pod(sandbox, str(self.path), 60.0))
        self.assert_nothing_left()

    async def test_other_providers_do_not_offer_it(self) -> None:
        world = FakeNode()
        world.provider_ready()
        self.addCleanup(world.kill)
        self.world = world
        self.checkpoints = Checkpoints(reactor, self.directory, world.node.providers, world.containers)
        self.calls = CheckpointCalls(self.checkpoints)
        container = await self.container()
        for _ in range(2):
            self.assertIn("fake", await self.fails(Unimplemented, self.ask(container)))


def _turn() -> Deferred[None]:
    turned: Deferred[None] = Deferred()
    reactor.callLater(0, turned.callback, None)
    return turned
