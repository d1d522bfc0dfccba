# SPDX-License-Identifier: Apache-2.0
"""The node's containerd has the images of VMs."""

from __future__ import annotations

import shutil
import tempfile
from datetime import timedelta
from pathlib import Path

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.endpoints import UNIXClientEndpoint, UNIXServerEndpoint
from twisted.internet.threads import deferToThread
from twisted.trial.unittest import TestCase

from infranetes.delegate import containerd_api
from infranetes.delegate.containerd_api import ContainerdApi
from infranetes.delegate.containerd_content import DISCARDED, ContainerdContent
from infranetes.delegate.layer_source import OTHER, LayersMissing
from infranetes.images import Image, ImagesConfig
from infranetes.images.preload import gather_disks
from infranetes_common.concurrency import sleep, start
from infranetes_common.errors import DataLoss, FailedPrecondition, NotFound, Unavailable
from tests.contract import layer_source
from tests.harness.needs import needs_registry
from tests.infranetes.delegate.content_case import ContentCase, Images, reactor
from tests.infranetes.images.support import small
from tests.support import oci
from tests.support.waiting import until
from txgrpc import Channel, Server
from txgrpc.raw import RawStub


@needs_registry
class ContractTests(layer_source.LayerSourceContract, ContentCase):
    """The contract that holds for every runtime."""


@needs_registry
class FindTests(ContentCase):
    """Which image a name means."""

    async def test_an_image_is_found_by_its_name_its_id_and_its_digest(self) -> None:
        built = small("found", config={"User": "1000:5"})
        reference = await self.pulled("found", built)
        digest = f"{reference.rpartition(':')[0]}@{built.manifest.digest}"
        for name in (reference, built.id, digest, built.id[len("sha256:") :][:12]):
            image = await self.images.find(name)
            self.assertEqual(
                (image.id, image.repo_tags, image.repo_digests), (built.id, (reference,), (digest,))
            )
            self.assertEqual((image.diff_ids, image.uid, image.pinned), (built.diff_ids, 1000, False))
            self.assertGreater(image.size, 0)
        self.assertEqual(self.images.cached(built.id), image)
        self.assertEqual(await self.images.config(built.id), built.config.data)

    async def test_one_that_was_not_pulled_is_not_found(self) -> None:
        for name in ("127.0.0.1:1/lacking:1", "sha256:" + "0" * 64):
            await self.assertFailure(start(self.images.find(name)), NotFound)
        self.assertIsNone(self.images.cached("sha256:" + "0" * 64))

    async def test_a_tag_that_moves_means_another_image(self) -> None:
        reference = await self.pulled("moved", small("before"))
        self.assertEqual((await self.images.find(reference)).id, small("before").id)
        await self.pulled("moved", small("after"))
        self.assertEqual((await self.images.find(reference)).id, small("after").id)

    async def test_of_several_platforms_containerds_is_taken(self) -> None:
        mine, other = small("mine"), small("other", architecture="s390x")
        reference = await self.pulled("several", oci.index([other, mine]))
        image = await self.images.find(reference)
        self.assertEqual((image.id, image.diff_ids), (mine.id, mine.diff_ids))
        self.assert_right(await self.images.disks(image.id), mine.diff_ids)

    async def test_preloaded_images_are_pulled_and_made_disks(self) -> None:
        built = small("preloaded")
        reference = await deferToThread(self.registry.push, "preloaded", "1", built)
        self.images.reconfigure(ImagesConfig(preload=(reference,)))
        names = (reference, f"{self.registry.host}/nowhere:1")
        self.assert_right(await gather_disks(self.images, names, lambda words: None), built.diff_ids)
        self.assertTrue((await self.images.find(built.id)).pinned)


@needs_registry
class DiskTests(ContentCase):
    """Disks are made of layers."""

    async def found(self, name: str, built: oci.BuiltImage) -> Image:
        return await self.images.find(await self.pulled(name, built))

    async def test_layers_become_disks_once_for_all_images(self) -> None:
        one, two = small("one"), small("two")
        first, second = await self.found("one", one), await self.found("two", two)
        self.assert_right(await self.images.disks(first.id), one.diff_ids)
        self.assertEqual(set(self.images.made), set(one.diff_ids))
        self.assert_right(await self.images.disks(second.id), two.diff_ids)
        self.assertEqual(self.images.made[2:], [two.diff_ids[1]])
        again = await self.started()
        self.assert_right(await again.disks(second.id), two.diff_ids)
        self.assertEqual(again.made, [])
        self.assertEqual([*(self.directory / "copies").iterdir()], [])

    async def test_layers_of_every_compression_become_disks(self) -> None:
        for compression in ("", "zstd"):
            built = small(f"as {compression}", compression=compression)
            image = await self.found(f"as{compression}", built)
            self.assert_right(await self.images.disks(image.id), built.diff_ids)

    async def test_an_image_that_is_removed_while_its_disks_are_made_is_kept_so_long(self) -> None:
        built = small("removed")
        image = await self.found("removed", built)
        self.images.gate = Deferred()
        making = start(self.images.disks(image.id))
        await self.images.begun
        await self.remove(image.id)
        self.images.gate.callback(None)
        self.assert_right(await making, built.diff_ids)
        await self.assertFailure(start(self.images.find(image.id)), NotFound)

    async def test_calls_at_the_same_time_share_the_work_which_outlives_them(self) -> None:
        image = await self.found("shared", small("shared"))
        self.images.gate = Deferred()
        calls = [start(self.images.disks(image.id)) for _ in range(3)]
        await self.images.begun
        calls[0].cancel()
        self.images.gate.callback(None)
        self.assertEqual(await calls[1], await calls[2])
        self.assertEqual(len(self.images.made), 2)
        await self.assertFailure(calls[0], CancelledError)

    async def test_a_blob_that_is_shorter_than_it_was_is_not_used(self) -> None:
        built = small("short")
        image = await self.found("short", built)
        blob = self.containerd.blob(built.layers[1].digest)
        blob.chmod(0o600)
        blob.write_bytes(blob.read_bytes()[:-7])
        error = await self.assertFailure(start(self.images.disks(image.id)), DataLoss)
        self.assertIn("pull it again", str(error))

    async def test_a_blob_with_another_content_is_not_used(self) -> None:
        built = small("changed")
        image = await self.found("changed", built)
        blob = self.containerd.blob(built.layers[1].digest)
        blob.chmod(0o600)
        other = small("CHANGED").layers[1].data
        blob.write_bytes(other.ljust(len(built.layers[1].data), b"\0")[: len(built.layers[1].data)])
        await self.assertFailure(start(self.images.disks(image.id)), FailedPrecondition)

    async def test_without_containerd_nothing_is_known_and_nothing_removed(self) -> None:
        built = small("away")
        image = await self.found("away", built)
        await self.images.disks(image.id)
        await deferToThread(self.containerd.stop_process)
        there = self.on_disk()
        for call in (self.images.find(image.id), self.images.sweep()):
            await self.assertFailure(start(call), Unavailable)
        self.assertEqual(self.on_disk(), there)
        self.assert_right(await self.images.disks(image.id), built.diff_ids)


@needs_registry
class SweepTests(ContentCase):
    """Disks of layers that are in no image any more."""

    async def test_disks_go_with_the_last_image_that_has_their_layers(self) -> None:
        one, two = small("first"), small("second")
        for name, built in (("first", one), ("second", two)):
            await self.images.disks((await self.images.find(await self.pulled(name, built))).id)
        await self.images.sweep()
        self.assertEqual(self.on_disk(), {*one.diff_ids, *two.diff_ids})
        await self.remove(one.id)
        await self.images.sweep()
        self.assertEqual(self.on_disk(), set(two.diff_ids))
        self.assertIsNone(self.images.cached(one.id))
        await self.remove(two.id)
        await (await self.started()).sweep()
        self.assertEqual(self.on_disk(), set())

    async def test_what_is_held_stays(self) -> None:
        built = small("held")
        image = await self.images.find(await self.pulled("held", built))
        await self.images.disks(image.id)
        async with self.images.held(image.id):
            await self.remove(image.id)
            await self.images.sweep()
            self.assertEqual(self.on_disk(), set(built.diff_ids))
        await self.images.sweep()
        self.assertEqual(self.on_disk(), set())


class _Elsewhere(ContainerdApi):
    """A containerd whose blobs are where this daemon can't see them."""

    async def root(self) -> Path | None:
        return None


@needs_registry
class CopyTests(ContentCase):
    """Blobs that are not files here are copied while they are needed."""

    def make_api(self) -> ContainerdApi:
        return _Elsewhere(reactor, RawStub(self.channel))

    async def test_layers_are_read_through_containerd(self) -> None:
        built = await deferToThread(small, "copied" * 300_000)
        image = await self.images.find(await self.pulled("copied", built))
        self.assert_right(await self.images.disks(image.id), built.diff_ids)
        self.assertEqual([*(self.directory / "copies").iterdir()], [])

    async def test_what_is_read_is_checked(self) -> None:
        built = small("damaged")
        image = await self.images.find(await self.pulled("damaged", built))
        blob = self.containerd.blob(built.layers[0].digest)
        blob.chmod(0o600)
        blob.write_bytes(b"x" * len(built.layers[0].data))
        await self.assertFailure(start(self.images.disks(image.id)), DataLoss)
        self.assertEqual([*(self.directory / "copies").iterdir()], [])


@needs_registry
class DiscardTests(ContentCase):
    """A containerd that deletes the layers that it has unpacked."""

    discards = True

    async def test_it_is_refused_in_one_sentence_by_a_look_at_its_content(self) -> None:
        self.assertEqual(await self.images.refusal(), "")
        built = small("discarded")
        image = await self.images.find(await self.pulled("discarded", built))
        # containerd collects its garbage before it answers that.
        await self.remove(await self.pulled("other", small("other")))
        error = await self.assertFailure(start(self.images.disks(image.id)), LayersMissing)
        for words in (image.id, "crictl rmi", "discard_unpacked_layers = false"):
            self.assertIn(words, str(error))
        self.assertEqual(await self.images.refusal(), DISCARDED)
        again = await self.started()
        await until(lambda: again.told, "it is refused")
        self.assertEqual(again.told, [DISCARDED])


class OtherRuntimeTests(TestCase):
    """A runtime that is not containerd."""

    async def test_it_is_refused_in_one_sentence(self) -> None:
        directory = Path(tempfile.mkdtemp(prefix="delegate-images-"))
        self.addCleanup(shutil.rmtree, directory)
        path = str(directory / "socket")
        port = await UNIXServerEndpoint(reactor, path).listen(Server(reactor, []).factory)
        self.addCleanup(port.stopListening)
        channel = Channel(reactor, UNIXClientEndpoint(reactor, path))
        self.addCleanup(channel.close)
        stub = RawStub(channel)
        content = ContainerdContent(
            reactor, ContainerdApi(reactor, stub), directory / "copies", "linux/amd64"
        )
        images = Images(stub, content, directory / "disks")
        self.assertEqual(await images.refusal(), OTHER)


@needs_registry
class KeptLayersTests(ContentCase):
    """A containerd that keeps layers, which it does by default."""

    async def test_it_is_not_refused_for_one_image_that_it_had_without_its_layers_before(self) -> None:
        built, other = small("whole"), small("without", config={"Cmd": ["/other"]})
        for name, each in (("whole", built), ("without", other)):
            await self.pulled(name, each)
        self.containerd.delete(other.layers[1].digest)
        self.assertEqual(await self.images.refusal(), "")
        await self.assertFailure(start(self.images.disks(other.id)), LayersMissing)
        self.assert_right(await self.images.disks(built.id), built.diff_ids)

    async def test_what_a_killed_daemon_left_leased_is_void_after_its_time(self) -> None:
        built = small("leased")
        reference = await self.pulled("leased", built)
        for lease, there in ((timedelta(hours=1), True), (timedelta(seconds=2), False)):
            self.patch(containerd_api, "LEASE", lease)
            async with self.api.leased([built.layers[1].digest]):
                if not there:
                    await sleep(reactor, lease.total_seconds() + 0.1)
                await self.remove(reference)
                self.assertIs(self.containerd.blob(built.layers[1].digest).exists(), there)
            await self.pulled("leased", built)

    async def test_copies_that_a_killed_daemon_left_are_removed(self) -> None:
        left = self.directory / "copies" / "left"
        left.write_bytes(b"half")
        await self.started()
        self.assertFalse(left.exists())
