# SPDX-License-Identifier: Apache-2.0
"""Volumes of a pod that is held still: secrets are brought again, and nothing else changes meanwhile."""

from __future__ import annotations

import os
from pathlib import Path
from typing import cast

import attrs
from twisted.internet.defer import Deferred

from infranetes.pods.node.inventory import Container, Sandbox
from infranetes.volumes import mounts
from infranetes.volumes.mounts import Source, find_source
from infranetes_common.concurrency import start
from infranetes_common.errors import Unavailable
from infranetes_common.wire import cri
from tests.infranetes.volumes.carrying_case import OneContainer
from tests.infranetes.volumes.test_volumes import VolumesCase


@attrs.frozen
class Mounting:
    """A container with mounts."""

    sandbox: Sandbox
    config: cri.ContainerConfig


class StillnessTests(VolumesCase):
    """The container c1 has a secret, and a directory of the node."""

    def setUp(self) -> None:
        super().setUp()
        self.secret = self.top / "secret"
        self.secret.mkdir()
        (self.secret / "key").write_text("tell nobody")
        self.in_memory = {str(self.secret)}
        self.patch(mounts, "find_source", self._find)
        self.secret_id = Source(str(self.secret), False, False).id
        self.mounts = [
            self.mount(self.secret, readonly=True),
            cri.Mount(container_path="/shared", host_path=str(self.node)),
        ]
        self.prepared("c1", *self.mounts)
        self.agent.calls.clear()

    def _find(self, mount: cri.Mount, *rest: object) -> Source:
        found: Source = find_source(mount, *rest)  # type: ignore[arg-type]  # what the volumes give
        return attrs.evolve(found, in_memory=found.path in self.in_memory)

    def hold(self) -> list[str]:
        return self.successResultOf(start(self.volumes.hold_still(self.sandbox)))

    def go_on(self) -> Deferred[None]:
        return start(self.volumes.go_on(self.sandbox))

    @property
    def there_key(self) -> Path:
        return self.agent.path(self.secret_id) / "key"

    def test_secrets_are_to_be_emptied_and_are_brought_again(self) -> None:
        self.assertEqual(self.hold(), [self.secret_id])
        self.there_key.unlink()
        self.successResultOf(self.go_on())
        self.assertEqual(self.there_key.read_text(), "tell nobody")
        self.assertEqual(self.agent.calls, ["list", "put"])
        self.successResultOf(self.go_on())

    def test_a_secret_that_changes_meanwhile_comes_at_the_end(self) -> None:
        self.hold()
        self.there_key.unlink()
        (self.secret / "key").write_text("another one")
        self.clock.advance(5.0)
        self.assertFalse(self.there_key.exists())
        self.successResultOf(self.go_on())
        self.assertEqual(self.there_key.read_text(), "another one")
        (self.secret / "key").write_text("a third one")
        self.clock.advance(2.0)
        self.assertEqual(self.there_key.read_text(), "a third one")

    def test_what_containers_may_write_to_is_not_named_and_not_changed(self) -> None:
        self.in_memory.add(str(self.node))
        self.prepared("c2", *self.mounts)
        self.assertEqual(self.hold(), [self.secret_id])
        for path in self.there.iterdir():
            path.unlink()
        (self.node / "new").write_text("of the node")
        self.clock.advance(5.0)
        self.assertFalse((self.there / "new").exists())
        self.assertTrue((self.node / "new").exists())
        self.successResultOf(self.go_on())

    def test_what_can_not_be_brought_is_told_and_brought_the_next_time(self) -> None:
        self.hold()
        self.there_key.unlink()
        self.agent.failing = {"put": Unavailable("the connection is lost")}
        self.failureResultOf(self.go_on(), Unavailable)
        self.agent.failing = {}
        self.successResultOf(self.go_on())
        self.assertEqual(self.there_key.read_text(), "tell nobody")

    def test_the_next_daemon_brings_them(self) -> None:
        self.hold()
        self.there_key.unlink()
        self.volumes = self.daemon()
        self.successResultOf(self.go_on())
        self.assertEqual(self.there_key.read_text(), "tell nobody")

    def test_a_hold_that_is_cancelled_lets_them_change(self) -> None:
        volume = self.volumes._volumes["s1"][self.volume_id]
        self.successResultOf(volume.lock.acquire())
        holding = start(self.volumes.hold_still(self.sandbox))
        self.assertNoResult(holding)
        holding.cancel()
        self.failureResultOf(holding)
        volume.lock.release()
        self.successResultOf(self.go_on())
        for each in self.volumes._volumes["s1"].values():
            self.assertFalse(each.lock.locked)

    def test_a_container_can_be_removed_once_the_vm_is_gone(self) -> None:
        self.hold()
        releasing = start(self.volumes.release(self.as_container("c1")))
        self.assertNoResult(releasing)
        self.volumes.disconnected(self.sandbox)
        self.successResultOf(releasing)
        self.successResultOf(self.go_on())

    def as_container(self, id: str) -> Container:
        return cast(Container, self.fake.containers[id])

    def mounting(self, *mounts: cri.Mount) -> Container:
        return cast(Container, Mounting(self.sandbox, cri.ContainerConfig(mounts=mounts)))

    def test_its_volumes_are_known_by_their_places_in_the_container(self) -> None:
        image = cri.Mount(container_path="/image", image=cri.ImageSpec(image="x"))
        self.mounts.append(image)
        made = self.mounting(*self.mounts)
        said = self.successResultOf(start(self.volumes.volumes_of(made)))
        self.assertEqual(said, {"/data": self.secret_id, "/shared": self.volume_id})
        self.assertEqual(self.agent.calls, [])

    def test_a_mount_that_can_not_be_looked_at_is_named(self) -> None:
        (self.top / "socket").symlink_to("/dev/null")
        made = self.mounting(self.mount(self.top / "socket"))
        failure = self.failureResultOf(start(self.volumes.volumes_of(made)))
        self.assertIn("config.mounts[0]", str(failure.value))


class TakenTests(VolumesCase):
    """Volumes that a kept container had, which become another pod's."""

    def adopt(self, *mounts: cri.Mount) -> None:
        made = OneContainer("c1", self.sandbox, adopts=True)
        self.fake.containers["c1"] = made
        self.successResultOf(self.prepare(cast(Container, made), *mounts))

    def setUp(self) -> None:
        super().setUp()
        self.there.mkdir()
        self.agent.made[self.volume_id] = (False, False, 0, 0)
        (self.there / "hosts").write_text("10.0.0.1 the kept pod")
        (self.there / "old").write_text("of the kept pod")

    def test_the_nodes_side_counts_wherever_they_differ(self) -> None:
        (self.node / "hosts").write_text("10.0.0.2 the new pod")
        os.utime(self.node / "hosts", (1, 1))  # older than what the kept pod had
        self.adopt()
        self.assertEqual([each.name for each in self.there.iterdir()], ["hosts"])
        for side in (self.there, self.node):
            self.assertEqual((side / "hosts").read_text(), "10.0.0.2 the new pod")
        self.assertFalse((self.node / "old").exists())

    def test_what_it_writes_from_then_on_comes_to_the_node(self) -> None:
        self.adopt()
        (self.there / "new").write_text("written")
        self.caught_up("c1")
        self.assertEqual((self.node / "new").read_text(), "written")

    def test_one_that_another_container_has_already_is_not_taken_again(self) -> None:
        self.prepared("c0")
        (self.there / "new").write_text("written")
        self.adopt()
        self.assertEqual((self.node / "new").read_text(), "written")
