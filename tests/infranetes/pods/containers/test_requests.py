# SPDX-License-Identifier: Apache-2.0
"""CreateContainer: what is refused, what the agent is asked for, what is known then, and what is released."""

from __future__ import annotations

from typing import Any

import attrs
from twisted.internet.defer import Deferred

from infranetes.images import Image
from infranetes.pods.containers.creation import UNDO_SECONDS
from infranetes.pods.node.hooks import PodFeature
from infranetes.pods.node.inventory import Container
from infranetes.pods.store.states import ContainerState
from infranetes_common.concurrency import start
from infranetes_common.errors import AlreadyExists, FailedPrecondition, InvalidArgument, NotFound, Unavailable
from infranetes_common.wire import cri, vmserver
from tests.infranetes.pods.case import ContainersTestCase
from tests.infranetes.pods.fake_images import IMAGE
from tests.infranetes.pods.fakes import box, pod

OTHER = "sha256:" + "2" * 64


class RefusedTests(ContainersTestCase):
    """What can't be had is refused before there is a record, and before the agent is asked."""

    def refuse(self, config: Any, kind: type[Exception]) -> str:
        words = str(self.failureResultOf(self.start_create(config), kind).value)
        self.assertEqual((self.agent.calls, self.world.store.contents().containers), ([], ()))
        return words

    def test_in_a_pod_that_was_stopped_whatever_its_image(self) -> None:
        self.do(self.world.sandboxes.stop(self.sandbox))
        self.assertIn("not ready", self.refuse(box(image="nginx"), FailedPrecondition))

    def test_in_a_pod_that_is_still_being_launched(self) -> None:
        self.world.provider.booting = Deferred()
        launching = self.start(pod("other"))
        (self.sandbox,) = (one.id for one in self.world.node.inventory if one.id != self.sandbox)
        self.refuse(box(), NotFound)
        self.world.provider.booting.callback(None)
        self.successResultOf(launching)

    def test_of_an_image_of_another_kind_than_the_pods(self) -> None:
        self.world.node.handlers.image_source = lambda id: "aws"
        self.assertIn("is one of aws", self.refuse(box(), InvalidArgument))

    def test_one_that_wants_to_see_the_processes_of_none_of_the_pods(self) -> None:
        config = box()
        options = config.linux.security_context.namespace_options
        options.pid, options.target_id = cri.TARGET, "f" * 32
        self.assertIn("no container of this sandbox", self.refuse(config, FailedPrecondition))

    def test_one_with_another_user_namespace_than_its_pod(self) -> None:
        config = box()
        options = config.linux.security_context.namespace_options.userns_options
        options.mode = cri.POD
        for ids in (options.uids, options.gids):
            ids.add(host_id=100_000, container_id=0, length=65536)
        self.refuse(config, InvalidArgument)

    def test_a_pod_with_a_user_namespace_that_its_vm_does_not_make(self) -> None:
        config = pod("other")
        config.linux.security_context.namespace_options.userns_options.mode = cri.POD
        for ids in ("uids", "gids"):
            options = config.linux.security_context.namespace_options.userns_options
            getattr(options, ids).add(host_id=100_000, container_id=0, length=65536)
        words = str(self.failureResultOf(self.start(config), InvalidArgument).value)
        self.assertIn("does not support user namespaces", words)
        self.assertEqual(len(self.world.store.contents().sandboxes), 1)


class AskedTests(ContainersTestCase):
    """What the agent and the features are asked for."""

    def test_it_is_recorded_before_the_features_do_anything_for_it(self) -> None:
        seen: list[ContainerState] = []

        async def look(container: Container) -> None:
            seen.append(self.kept(container.id).state)

        self.patch(self.world.node.features, "before_create", look)
        self.create()
        self.assertEqual(seen, [ContainerState.CREATING])

    def test_the_images_that_it_mounts_are_brought_too_each_once_and_named_by_their_ids(self) -> None:
        other = Image(OTHER, (), (), 1, ("sha256:c",), "", False, told_id="told")
        find = self.world.images.find

        async def found(name: str) -> Image:
            return other if name == "other" else await find(name)

        self.patch(self.world.images, "find", found)
        names = ("other", "busybox", "other")
        mounts = [
            cri.Mount(container_path=f"/{number}", image=cri.ImageSpec(image=name))
            for number, name in enumerate(names)
        ]
        self.create(box(mounts=mounts))
        self.assertEqual([id for id, _ in self.agent.loads], [IMAGE, OTHER])
        (sent,) = self.agent.created
        self.assertEqual([mount.image.image for mount in sent.mounts], [OTHER, IMAGE, OTHER])

    def test_a_mount_of_an_image_without_a_name_is_not_taken_for_one_of_a_path(self) -> None:
        mount = cri.Mount(container_path="/x", image=cri.ImageSpec())
        words = str(self.failureResultOf(self.start_create(box(mounts=[mount])), NotFound).value)
        self.assertIn("config.mounts[0] at /x", words)

    def test_until_when_it_is_waited_for_is_known(self) -> None:
        self.do(self.world.containers.create(self.sandbox, box(), 60.0))
        sandbox = self.world.node.inventory.sandboxes[self.sandbox]
        self.assertEqual(sandbox.asked_until, self.world.clock.seconds() + 60.0)

    def test_what_is_undone_gives_the_agent_little_time(self) -> None:
        asked: list[float] = []

        async def remove(id: str, within: float = 30.0) -> None:
            asked.append(within)

        self.patch(self.agent, "remove", remove)
        self.agent.create_error = Unavailable("no answer")
        self.failureResultOf(self.start_create(), Unavailable)
        self.assertEqual(asked, [UNDO_SECONDS])


class KnownTests(ContainersTestCase):
    """What is known of a container that was made."""

    def test_it_is_made_once_that_is_on_the_disk(self) -> None:
        on_disk: Deferred[None] = Deferred()
        put = self.world.store.put_container

        def slowly(record: Any) -> Deferred[None]:
            made = record.state is ContainerState.CREATED
            return on_disk.addCallback(lambda _: put(record)) if made else put(record)

        patch = self.patch(self.world.store, "put_container", slowly)
        creating = self.start_create()
        (container,) = self.world.node.inventory.containers.values()
        self.assertIs(container.state, ContainerState.CREATING)
        patch.restore()
        on_disk.callback(None)
        self.successResultOf(creating)
        self.assertIs(container.state, ContainerState.CREATED)

    def test_its_limits_are_those_that_its_agent_has_given_it(self) -> None:
        create, given = self.agent.create, cri.LinuxContainerResources(memory_limit_in_bytes=4096)

        async def rounded(*arguments: Any) -> vmserver.ContainerState:
            state = await create(*arguments)
            state.resources.CopyFrom(given)
            return state

        self.patch(self.agent, "create", rounded)
        made = self.create(
            box(
                linux=cri.LinuxContainerConfig(resources=cri.LinuxContainerResources(memory_limit_in_bytes=5))
            )
        )
        self.assertEqual(self.world.node.inventory.containers[made].limits, given)

    def test_its_image_is_called_as_the_nodes_runtime_calls_it(self) -> None:
        self.world.images.image = attrs.evolve(self.world.images.image, told_id="told")
        kept = self.kept(self.create())
        self.assertEqual((kept.image_ref, kept.image_id), ("told", IMAGE))

    def test_one_that_is_being_removed_is_not_given_to_who_asks_for_it_again(self) -> None:
        self.agent.holding = Deferred()
        creating = self.start_create()
        creating.cancel()  # so that nobody knows it
        self.failureResultOf(creating)
        self.agent.holding.callback(None)
        (id,) = self.world.node.inventory.containers
        self.agent.away = True
        self.failureResultOf(start(self.world.containers.remove(id)), Unavailable)
        self.agent.away = False
        self.failureResultOf(self.start_create(), AlreadyExists)

    def test_a_record_that_a_client_knows_it_may_fail(self) -> None:
        made = self.create()
        container = self.world.node.inventory.containers[made]
        container.record = attrs.evolve(container.record, claimed=False)
        self.world.store.failing = Unavailable("full")
        self.assertIs(self.world.containers.lookup(made), container)  # and no error is left unhandled
        self.world.store.failing = None

    def test_a_daemon_that_stops_leaves_a_creation_to_the_next(self) -> None:
        self.agent.loaded.clear()
        self.agent.holding = Deferred()
        creating = self.start_create()
        creating.addErrback(lambda failure: None)
        (id,) = self.world.node.inventory.containers
        self.world.stop()
        self.assertIs(self.kept(id).state, ContainerState.CREATING)
        self.assertNotIn(("remove", id), self.agent.calls)


class ReleasedTests(ContainersTestCase):
    """What a container had is released before its record goes, and its name after that."""

    def test_so_that_the_next_daemon_releases_it_too(self) -> None:
        seen: list[int] = []

        class Feature(PodFeature):
            name = "one that looks"

            async def release(self, container: Container) -> None:
                seen.append(len(world.store.contents().containers))

        world = self.world
        world.join(Feature())
        made = self.create()
        self.agent.streams.clear()  # which would tell that it is removed
        self.do(world.containers.remove(made))
        self.assertEqual((seen, world.logs.aborted), ([1], [made]))

    def test_the_name_is_free_once_the_record_is_deleted(self) -> None:
        made = self.create()
        deleted: Deferred[None] = Deferred()
        delete = self.world.store.delete_container
        self.patch(self.world.store, "delete_container", lambda id: deleted.addCallback(lambda _: delete(id)))
        removing = start(self.world.containers.remove(made))
        self.failureResultOf(self.start_create(), AlreadyExists)
        deleted.callback(None)
        self.successResultOf(removing)
        self.create()
