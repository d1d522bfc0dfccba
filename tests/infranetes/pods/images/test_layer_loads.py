# SPDX-License-Identifier: Apache-2.0
"""Images that are loaded into VMs as layers: shown as disks, or sent."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import Deferred
from twisted.logger import capturedLogs

from infranetes.pods.images import layer_loads
from infranetes.pods.node import load_progress
from infranetes.pods.node.loads import STREAMS, Loads
from infranetes_common.concurrency import start
from infranetes_common.errors import (
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    InfranetesError,
    OutOfRange,
    ResourceExhausted,
    Unavailable,
)
from infranetes_common.wire import cri
from tests.infranetes.pods import layers
from tests.infranetes.pods.case import ContainersTestCase
from tests.infranetes.pods.fakes import box
from tests.infranetes.pods.layers import (
    LAYER_BYTES,
    DiskProvider,
    LayerAgent,
    LayerImages,
    LayerNode,
    image,
    layer,
)

UNUSED = 60.0
A, B, C = image("a").id, image("b").id, image("c").id


class LayersTestCase(ContainersTestCase):
    """A sandbox whose agent accepts layers."""

    shows = True
    agent: LayerAgent

    def make_world(self) -> LayerNode:
        return LayerNode(self.shows, unused=UNUSED)

    @property
    def images(self) -> LayerImages:
        images = self.world.images
        assert isinstance(images, LayerImages)
        return images

    @property
    def provider(self) -> DiskProvider:
        provider = self.world.provider
        assert isinstance(provider, DiskProvider)
        return provider

    @property
    def shown(self) -> list[str]:
        return sorted(f"sha256:{one.name}" for one in self.provider.shown)

    @property
    def loads(self) -> Loads:
        return self.world.node.inventory.sandbox(self.sandbox).loads

    def of(self, name: str, container: str = "main", attempt: int = 0) -> Any:
        return box(container, attempt, image=name)

    def fails(self, kind: type[InfranetesError], create: Deferred[str]) -> str:
        return str(self.failureResultOf(create, kind).value)

    def remove(self, container: str) -> None:
        self.do(self.world.containers.remove(container))


class ShownTests(LayersTestCase):
    """The provider shows disks."""

    def test_the_layers_are_shown_and_mounted_at_once_then_the_image_is_made(self) -> None:
        self.create(self.of("a"))
        self.assertEqual(self.shown, [layer(1), layer(2)])
        self.assertIn(("mount", (layer(1), layer(2))), self.agent.asked)
        self.assertEqual(self.agent.loaded, {A})

    def test_what_a_vm_is_not_shown_its_agent_is_not_asked_of(self) -> None:
        self.create(self.of("a"))
        self.assertEqual([asked for asked, _ in self.agent.asked if asked != "info"], ["mount"])
        self.assertEqual(self.agent.loaded, {A})

    def test_of_a_running_containers_image_the_agent_is_not_asked(self) -> None:
        self.run_container(self.of("a"))
        self.agent.asked.clear()
        self.create(self.of("a", "other"))
        self.assertEqual(self.agent.asked, [])

    def test_layers_that_are_there_are_not_shown_again(self) -> None:
        self.create(self.of("a"))
        self.create(self.of("b", "other"))
        self.assertEqual(self.agent.asked[-1], ("mount", (layer(3),)))
        self.assertEqual(self.agent.loaded, {A, B})

    def test_a_layer_that_is_there_twice_is_brought_once(self) -> None:
        self.create(self.of("c"))
        self.assertEqual(self.agent.asked[-1], ("mount", (layer(2), layer(4))))

    def test_the_agent_is_asked_once_whether_it_takes_layers(self) -> None:
        self.create(self.of("a"))
        self.create(self.of("b", "other"))
        self.assertEqual(self.agent.asked.count(("info", ())), 1)

    def test_the_next_daemon_asks_the_agent_again(self) -> None:
        self.world.restart()
        self.create(self.of("a"))
        self.assertEqual(self.agent.loaded, {A})

    def test_an_image_waits_for_the_layers_that_another_ones_load_brings(self) -> None:
        self.agent.mounting = Deferred()
        first, second = self.start_create(self.of("a")), self.start_create(self.of("b", "other"))
        mounts = [asked for asked in self.agent.asked if asked[0] == "mount"]
        self.assertEqual(mounts, [("mount", (layer(1), layer(2))), ("mount", (layer(3),))])
        self.agent.mounting.callback(None)
        self.successResultOf(first)
        self.successResultOf(second)

    def test_an_image_whose_layers_are_there_waits_for_no_other(self) -> None:
        self.create(self.of("a"))
        self.agent.mounting = Deferred()
        waiting = self.start_create(self.of("b", "slow"))
        self.create(self.of("a", "quick"))
        self.assertNoResult(waiting)
        self.agent.mounting.callback(None)
        self.successResultOf(waiting)

    def test_a_disk_that_does_not_appear_is_shown_once_more_then_hidden(self) -> None:
        self.agent.blind = True
        said = self.fails(Unavailable, self.start_create(self.of("a")))
        self.assertIn("does not see a layer", said)
        self.assertEqual(self.shown, [])
        self.assertEqual([call for call, _ in self.provider.calls].count("show"), layer_loads.PLUG_ATTEMPTS)
        self.agent.blind = False
        self.create(self.of("a"))

    def test_what_is_no_layer_is_hidden_again(self) -> None:
        self.agent.mount_error = FailedPrecondition("what is on it is no layer")
        self.assertIn("no layer", self.fails(FailedPrecondition, self.start_create(self.of("a"))))
        self.assertEqual(self.shown, [])

    def test_a_provider_that_refuses_fails_the_creation_and_nothing_is_left_of_it(self) -> None:
        self.provider.show_error = ResourceExhausted("the VM has no place for so many disks")
        self.assertIn("no place", self.fails(ResourceExhausted, self.start_create(self.of("a"))))
        self.assertEqual(self.world.store.contents().containers, ())

    def test_the_files_are_held_until_the_vm_has_them(self) -> None:
        self.agent.mounting = Deferred()
        creating = self.start_create(self.of("a"))
        self.assertEqual(self.images.holding, [A])
        self.agent.mounting.callback(None)
        self.successResultOf(creating)
        self.assertEqual(self.images.holding, [])
        self.agent.mount_error = FailedPrecondition("what is on it is no layer")
        self.fails(FailedPrecondition, self.start_create(self.of("c", "other")))
        self.assertEqual(self.images.holding, [])

    def test_an_image_that_can_not_become_disks_says_why(self) -> None:
        self.images.broken = FailedPrecondition("it has 128 layers, and 127 are the most")
        self.assertIn("127 are the most", self.fails(FailedPrecondition, self.start_create(self.of("a"))))

    def test_an_agent_that_is_lost_meanwhile_is_asked_again(self) -> None:
        self.agent.mounting = Deferred()
        creating = self.start_create(self.of("a"))
        self.agent.away = True
        self.agent.mounting.callback(None)
        self.world.wait(10.0)
        self.assertNoResult(creating)
        self.agent.away = False
        self.agent.mounting = None
        self.world.wait(10.0)
        self.successResultOf(creating)

    def test_an_agent_that_stays_away_is_given_up(self) -> None:
        self.agent.mounting = Deferred()
        creating = self.start_create(self.of("a"))
        self.agent.away = True
        self.agent.mounting.callback(None)
        self.world.wait(layer_loads.PATIENCE_SECONDS + 10.0)
        self.fails(Unavailable, creating)

    def test_a_daemon_killed_after_showing_leaves_what_the_next_one_goes_on_with(self) -> None:
        self.agent.mounting = Deferred()
        creating = self.start_create(self.of("a"))
        creating.addErrback(lambda _: None)
        self.world.restart()
        self.agent.mounting = None
        self.create(self.of("a"))
        self.assertEqual(self.shown, [layer(1), layer(2)])
        self.assertEqual(self.agent.mounted, {layer(1), layer(2)})


class RetriedTests(LayersTestCase):
    """kubelet gives CreateContainer two minutes, then calls again with the same attempt."""

    def test_the_second_call_joins_the_load_and_the_container_is_made_once(self) -> None:
        self.agent.mounting = Deferred()
        first = self.start_create(self.of("a"))
        first.cancel()
        self.failureResultOf(first)
        self.assertEqual([one.state.value for one in self.world.store.contents().containers], ["creating"])
        second = self.start_create(self.of("a"))
        self.agent.mounting.callback(None)
        made = self.successResultOf(second)
        self.assertEqual([call for call in self.agent.calls if call[0] == "create"], [("create", made)])
        self.assertEqual([asked for asked, _ in self.agent.asked].count("mount"), 1)

    def test_the_load_of_a_container_that_is_removed_goes_on_for_the_next_one(self) -> None:
        self.agent.mounting = Deferred()
        first = self.start_create(self.of("a"))
        [container] = self.world.node.inventory.containers
        self.remove(container)
        self.fails(Unavailable, first)
        second = self.start_create(self.of("a"))
        self.agent.mounting.callback(None)
        self.successResultOf(second)
        self.assertEqual([asked for asked, _ in self.agent.asked].count("mount"), 1)

    def test_a_sandbox_that_is_stopped_ends_its_loads(self) -> None:
        self.agent.mounting = Deferred()
        cancelled: list[bool] = []
        self.agent.mounting.addErrback(lambda _: cancelled.append(True))
        creating = self.start_create(self.of("a"))
        stopping = start(self.world.sandboxes.stop(self.sandbox))
        self.fails(Unavailable, creating)
        self.assertEqual(cancelled, [True])
        self.successResultOf(stopping)


class SentTests(LayersTestCase):
    """The provider can't show disks."""

    shows = False

    def finish(self) -> None:
        while self.agent.puts:
            self.agent.puts[0].ended.callback(None)

    def test_each_missing_layer_is_sent_side_by_side(self) -> None:
        creating = self.start_create(self.of("a"))
        self.assertEqual([put.diff_id for put in self.agent.puts], [layer(1), layer(2)])
        self.assertNoResult(creating)
        self.finish()
        self.successResultOf(creating)

    def test_the_agent_is_asked_once_what_it_has_of_them(self) -> None:
        self.start_create(self.of("a"))
        asked = [each for each in self.agent.asked if each[0] == "layers"]
        self.assertEqual(asked, [("layers", (layer(1), layer(2)))])
        self.finish()

    def test_so_many_at_once_and_no_more(self) -> None:
        self.images.all.append(image("d", *range(10, 20)))
        creating = self.start_create(self.of("d"))
        self.assertEqual(len(self.agent.puts), STREAMS)
        self.agent.puts[0].ended.callback(None)
        self.assertEqual(len(self.agent.puts), STREAMS)
        creating.addErrback(lambda _: None)

    def test_a_broken_call_goes_on_from_what_has_arrived(self) -> None:
        creating = self.start_create(self.of("a"))
        first, second = self.agent.puts
        second.ended.callback(None)
        self.agent.arrived[layer(1)] = 600
        first.ended.errback(Unavailable("connection lost"))
        self.world.wait(1.0)
        [again] = self.agent.puts
        self.assertEqual((again.diff_id, again.offset), (layer(1), 600))
        self.finish()
        self.successResultOf(creating)

    def test_the_next_daemon_goes_on_from_what_has_arrived(self) -> None:
        self.start_create(self.of("a")).addErrback(lambda _: None)
        self.agent.arrived[layer(1)] = 600
        self.world.restart()
        creating = self.start_create(self.of("a"))
        self.assertEqual([put.offset for put in self.agent.puts], [600, 0])
        self.finish()
        self.successResultOf(creating)

    def test_a_layer_that_arrives_damaged_is_sent_once_more(self) -> None:
        creating = self.start_create(self.of("a"))
        self.agent.puts[0].ended.errback(DataLoss("its digest is another"))
        self.finish()
        self.successResultOf(creating)

    def test_a_layer_that_arrives_damaged_twice_is_an_error(self) -> None:
        creating = self.start_create(self.of("a"))
        for _ in range(2):
            [put] = [put for put in self.agent.puts if put.diff_id == layer(1)]
            put.ended.errback(DataLoss("its digest is another"))
        said = self.fails(DataLoss, creating)
        self.assertIn("its digest is another", said)

    def test_of_another_file_for_the_layer_nothing_has_arrived(self) -> None:
        self.agent.arrived[layer(1)], self.agent.digest = 600, "sha256:" + "e" * 64
        creating = self.start_create(self.of("a"))
        self.assertEqual([put.offset for put in self.agent.puts], [0, 0])
        self.finish()
        self.successResultOf(creating)

    def test_a_damaged_layer_that_is_found_at_the_end_is_brought_again(self) -> None:
        creating = self.start_create(self.of("a"))
        self.agent.damaged = layer(2)
        self.finish()
        self.successResultOf(creating)
        self.assertEqual(self.agent.sent, [layer(1), layer(2), layer(2)])

    def test_what_is_no_longer_there_is_sent_from_its_beginning(self) -> None:
        self.agent.arrived[layer(1)] = 600
        creating = self.start_create(self.of("a"))
        self.agent.arrived.clear()
        self.agent.puts[0].ended.errback(OutOfRange("0 bytes of it are here"))
        self.assertEqual(
            {(put.diff_id, put.offset) for put in self.agent.puts}, {(layer(1), 0), (layer(2), 0)}
        )
        self.finish()
        self.successResultOf(creating)

    def test_how_far_a_long_one_is_is_told_every_few_seconds_and_not_once_it_is_over(self) -> None:
        self.agent.arrived[layer(1)] = 600
        with capturedLogs() as told:
            creating = self.start_create(self.of("a"))
            self.world.wait(2.5 * load_progress.EVERY_SECONDS)
            self.finish()
            self.successResultOf(creating)
            self.world.wait(2.5 * load_progress.EVERY_SECONDS)
        lines = [event for event in told if "is being sent" in (event["log_format"] or "")]
        shown = [(one["image"], one["sandbox"], one["arrived"], one["size"], one["layers"]) for one in lines]
        self.assertEqual(shown, [(A, self.sandbox, 600, 2 * LAYER_BYTES, 2)] * 2)

    def test_a_call_that_takes_too_long_is_told_how_far_it_is_and_the_next_one_joins(self) -> None:
        self.patch(layers, "LAYER_BYTES", 115 << 20)
        self.agent.arrived[layer(1)] = 100 << 20
        first = start(self.world.containers.create(self.sandbox, self.of("a"), 119.0))
        self.world.wait(118.0)
        self.assertNoResult(first)
        [figures] = [one.figures() for one in self.loads.progress.values()]
        self.assertEqual(
            figures, {"image": A, "layers": 2, "arrived": 100 << 20, "size": 230 << 20, "seconds": 118.0}
        )
        self.world.wait(1.0)
        said = self.fails(DeadlineExceeded, first)
        self.assertIn(f"100 of 230 MiB of image {A} have been brought", said)
        self.assertIn("that goes on, so call again", said)
        second = self.start_create(self.of("a"))
        self.assertEqual(len(self.agent.puts), 2)
        self.finish()
        self.successResultOf(second)
        self.assertEqual(self.agent.sent, [layer(1), layer(2)])
        self.assertEqual(self.loads.progress, {})

    def test_a_full_disk_of_the_vm_is_told(self) -> None:
        creating = self.start_create(self.of("a"))
        self.agent.puts[0].ended.errback(ResourceExhausted("the VM's disk is too full"))
        self.assertIn("too full", self.fails(ResourceExhausted, creating))

    def test_images_that_share_a_layer_have_it_sent_once(self) -> None:
        first, second = self.start_create(self.of("a")), self.start_create(self.of("b", "other"))
        self.assertEqual([put.diff_id for put in self.agent.puts], [layer(1), layer(2), layer(3)])
        self.finish()
        self.successResultOf(first)
        self.successResultOf(second)

    def test_a_shared_layer_whose_load_fails_is_tried_again_by_the_other_image(self) -> None:
        first, second = self.start_create(self.of("a")), self.start_create(self.of("b", "other"))
        shared = self.agent.puts[0]
        shared.ended.errback(ResourceExhausted("the VM's disk is too full"))
        self.fails(ResourceExhausted, first)
        self.finish()
        self.finish()
        self.successResultOf(second)

    def test_what_arrives_renews_the_patience(self) -> None:
        creating = self.start_create(self.of("a"))
        for number in range(1, 6):
            self.agent.arrived[layer(1)] = number * LAYER_BYTES // 10
            for put in list(self.agent.puts):
                put.ended.errback(Unavailable("connection lost"))
            self.world.wait(0.6 * layer_loads.PATIENCE_SECONDS)
            self.assertNoResult(creating)
        self.finish()
        self.successResultOf(creating)


class UnusedSentTests(LayersTestCase):
    """An image whose layers were sent is removed, too."""

    shows = False

    def test_its_layers_are_removed_and_nothing_is_hidden(self) -> None:
        creating = self.start_create(self.of("a"))
        while self.agent.puts:
            self.agent.puts[0].ended.callback(None)
        self.remove(self.successResultOf(creating))
        self.agent.asked.clear()
        self.world.wait(UNUSED)
        self.assertEqual((self.agent.loaded, self.agent.mounted), (set(), set()))
        self.assertEqual(self.agent.asked[-2:], [("images", ()), ("remove", (layer(1), layer(2)))])


class UnusedTests(LayersTestCase):
    """An image is removed from the VM when no container has used it for a while."""

    def test_its_disks_are_hidden_but_those_that_another_image_needs(self) -> None:
        first = self.create(self.of("a"))
        self.create(self.of("b", "other"))
        self.remove(first)
        self.assertEqual(self.agent.loaded, {A, B})
        self.world.wait(UNUSED)
        self.assertEqual(self.agent.loaded, {B})
        self.assertEqual(self.shown, [layer(1), layer(3)])
        self.assertEqual(self.agent.mounted, {layer(1), layer(3)})

    def test_not_while_another_container_is_of_it(self) -> None:
        first = self.create(self.of("a"))
        self.create(self.of("a", attempt=1))
        self.remove(first)
        self.world.wait(2 * UNUSED)
        self.assertEqual(self.agent.loaded, {A})

    def test_not_while_a_container_is_being_made(self) -> None:
        first = self.create(self.of("a"))
        self.remove(first)
        self.agent.mounting = Deferred()
        creating = self.start_create(self.of("b"))
        self.world.wait(UNUSED)
        self.assertEqual(self.agent.loaded, {A})
        self.agent.mounting.callback(None)
        self.successResultOf(creating)
        self.world.wait(UNUSED)
        self.assertEqual(self.agent.loaded, {B})

    def test_a_load_that_begins_meanwhile_waits_and_brings_it_again(self) -> None:
        self.remove(self.create(self.of("a")))
        self.agent.removing = Deferred()
        self.world.wait(UNUSED)
        creating = self.start_create(self.of("a"))
        self.assertNoResult(creating)
        self.agent.removing.callback(None)
        self.successResultOf(creating)
        self.assertEqual(self.agent.mounted, {layer(1), layer(2)})

    def test_not_while_a_container_mounts_images(self) -> None:
        mount = cri.Mount(container_path="/data", image=cri.ImageSpec(image="b"))
        self.create(box(image="c", mounts=[mount]))
        self.remove(self.create(self.of("a", "other")))
        self.world.wait(UNUSED)
        self.assertEqual(self.agent.loaded, {A, B, C})

    def test_not_a_pinned_one(self) -> None:
        self.images.all[0] = image("a", 1, 2, pinned=True)
        self.remove(self.create(self.of("a")))
        self.remove(self.create(self.of("b", "other")))
        self.world.wait(UNUSED)
        self.assertEqual(self.agent.loaded, {A})

    def test_one_that_the_agent_keeps_does_not_keep_the_others(self) -> None:
        self.remove(self.create(self.of("a")))
        self.remove(self.create(self.of("b", "other")))
        remove = self.agent.remove_image

        async def refuse(image_id: str) -> None:
            if image_id == A:
                raise FailedPrecondition("something else uses it")
            await remove(image_id)

        self.patch(self.agent, "remove_image", refuse)
        self.agent.asked.clear()
        self.world.wait(UNUSED)
        self.assertEqual(self.agent.loaded, {A})
        self.assertEqual(self.agent.asked.count(("images", ())), 1, "one removal follows several containers")

    def test_a_sandbox_that_is_stopped_ends_the_removal(self) -> None:
        self.remove(self.create(self.of("a")))
        removing = self.agent.removing = Deferred()
        self.world.wait(UNUSED)
        self.assertFalse(removing.called)
        self.do(self.world.sandboxes.stop(self.sandbox))
        self.assertTrue(removing.called)

    def test_what_an_earlier_daemon_left_is_found(self) -> None:
        self.remove(self.create(self.of("a")))
        self.world.restart()
        self.remove(self.create(self.of("b")))
        self.world.wait(UNUSED)
        self.assertEqual((self.agent.loaded, self.shown), (set(), []))

    def test_disks_of_a_load_that_failed_are_hidden(self) -> None:
        self.agent.add_error = ResourceExhausted("the VM's disk is full")
        self.fails(ResourceExhausted, self.start_create(self.of("a")))
        self.world.wait(UNUSED)
        self.assertEqual(self.shown, [])

    def test_what_has_arrived_of_a_load_that_failed_is_deleted(self) -> None:
        self.create(self.of("b"))
        self.agent.arrived[layer(2)] = 600  # in no image of the VM, so only the agent knows of it
        self.agent.add_error = ResourceExhausted("the VM's disk is full")
        self.fails(ResourceExhausted, self.start_create(self.of("a", "other")))
        self.world.wait(UNUSED)
        self.assertEqual(self.agent.arrived, {})
        self.assertEqual((self.agent.mounted, self.agent.loaded), ({layer(1), layer(3)}, {B}))

    def test_an_agent_that_is_away_is_left_alone(self) -> None:
        self.remove(self.create(self.of("a")))
        self.agent.away = True
        self.world.wait(UNUSED)
        self.agent.away = False
        self.remove(self.create(self.of("b")))
        self.world.wait(UNUSED)
        self.assertEqual(self.shown, [])

    def test_nothing_is_left_to_do_once_the_sandbox_is_stopped(self) -> None:
        self.remove(self.create(self.of("a")))
        self.do(self.world.sandboxes.stop(self.sandbox))
        self.world.wait(UNUSED)
        self.assertNotIn("hide", [call for call, _ in self.provider.calls])
