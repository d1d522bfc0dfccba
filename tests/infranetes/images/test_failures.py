# SPDX-License-Identifier: Apache-2.0
"""The image store's failures: hostile registries, full disks, killed daemons, impatient callers."""

from __future__ import annotations

import contextlib
import errno
import gzip
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from twisted.internet.defer import CancelledError
from twisted.trial.unittest import SynchronousTestCase

from infranetes.images import index
from infranetes.images.reference import parse
from infranetes.images.skopeo import classify
from infranetes_common.errors import (
    FailedPrecondition,
    InfranetesError,
    NotFound,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
)
from tests.harness.durations import slow
from tests.harness.needs import needs_mounts, needs_registry
from tests.infranetes.images.hostile import HostileRegistry, begin_then_hang, endless, hang, send
from tests.infranetes.images.support import StoreCase, reactor, sleep, small
from tests.support import oci
from tests.support.oci import Blob
from tests.support.waiting import until

ROOT = Path(__file__).resolve().parents[3]


class WordsTests(SynchronousTestCase):
    """Errors made from skopeo's messages."""

    def test_a_registry_that_wants_credentials(self) -> None:
        for words in (
            "reading manifest 1 in example.org/web: unauthorized: authentication required",
            "reading manifest 1 in example.org/web: authentication required",  # skopeo 1.18
        ):
            error = classify(f'level=fatal msg="{words}"', parse("example.org/web:1"))
            self.assertIsInstance(error, Unauthenticated, words)

    def test_ports_and_digests_are_not_taken_for_what_a_server_answers(self) -> None:
        for number in (401, 403, 404, 429, 500):
            words = f"dial tcp 127.0.0.1:{number}39: connect: connection refused"
            self.assertIsInstance(classify(f'level=fatal msg="{words}"', parse("h/x:1")), Unavailable, words)
            words = f"Digest did not match, expected sha256:ab{number}cd, got sha256:{number}"
            told = str(classify(f'level=fatal msg="{words}"', parse("h/x:1")))
            self.assertIn("does not match its digest", told)
        for words, kind in (("received 404 Not Found", NotFound), ("status code 401", Unauthenticated)):
            self.assertIsInstance(classify(f'level=fatal msg="{words}"', parse("h/x:1")), kind)

    def test_the_end_of_long_words_has_no_half_of_a_secret(self) -> None:
        url = f"https://b.s3.example/x?X-Amz-Signature=ab&X-Amz-Security-Token={'Planted' * 128}"
        for words in (rf'level=fatal msg="copying: Get \"{url}\": i/o timeout"', f'Get "{url}": i/o timeout'):
            error = classify(words, parse("example.org/web:1"))
            self.assertIsInstance(error, Unavailable)
            self.assertIn('(hidden)": i/o timeout', str(error))
            self.assertNotIn("Planted", str(error))


def skopeos(directory: Path) -> list[int]:
    """Return the skopeo processes that work on that store."""
    found = []
    for entry in os.listdir("/proc"):
        try:
            arguments = Path(f"/proc/{entry}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if any(b"skopeo" in a for a in arguments) and any(str(directory).encode() in a for a in arguments):
            found.append(int(entry))
    return found


@needs_registry
class HostileCase(StoreCase):
    async def begin(self) -> None:
        self.hostile = HostileRegistry(reactor)
        self.store = await self.new_store(attempts=1, stall_seconds=3.0)

    async def end(self) -> None:
        await super().end()
        await self.hostile.stop()

    async def new_store(self, directory: Path | None = None, **config: Any) -> Any:
        config["insecure_registries"] = (self.hostile.host, self.registry.host)
        return await super().new_store(directory, **config)

    def assert_untouched(self) -> None:
        self.assertEqual(self.store.list(), [])
        self.assertEqual(self.blobs(), set())
        self.assert_nothing_left()


class HostileTests(HostileCase):
    """Whatever a registry answers, the error says what is wrong and nothing is left."""

    async def test_an_honest_answer_first(self) -> None:
        """The helper works: the tests below fail only because of what they spoil."""

        got = await self.store.pull(self.hostile.serve("x", small()))
        self.assertEqual(got.id, small().id)

    async def test_garbage_for_a_manifest(self) -> None:
        kind = small().manifest.media_type
        for garbage in (b"", b"{}", b"<html>", b"\0" * 1000, b'{"a":' * 10_000, b"[]"):
            self.hostile.answers["/g/manifests/1"] = send(garbage, kind)
            await self.fails(InfranetesError, self.store.pull(f"{self.hostile.host}/g:1"))
        self.assert_untouched()

    async def test_a_manifest_of_many_megabytes(self) -> None:
        image = small()
        reference = self.hostile.serve("big", image)
        padded = image.manifest.data + b" " * (6 << 20)
        self.hostile.answers["/big/manifests/1"] = send(padded, image.manifest.media_type)
        await self.fails(InfranetesError, self.store.pull(reference))
        self.assert_untouched()

    async def test_another_manifest_than_the_digest_that_was_asked_for(self) -> None:
        asked, sent = small("asked"), small("sent")
        for image in (asked, sent):
            self.hostile.serve("swap", image)
        end = f"/swap/manifests/{asked.manifest.digest}"
        self.hostile.answers[end] = send(sent.manifest.data, sent.manifest.media_type)
        reference = f"{self.hostile.host}/swap@{asked.manifest.digest}"
        await self.fails(Unavailable, self.store.pull(reference))
        self.assert_untouched()

    async def test_a_layer_or_configuration_with_other_bytes(self) -> None:
        image = small()
        for victim in image.blobs:
            reference = self.hostile.serve("bytes", image)
            other = bytes(len(victim.data) - 1) + b"x"
            self.hostile.put(victim, "bytes", send(other))
            await self.fails(InfranetesError, self.store.pull(reference))
            self.assert_untouched()

    async def test_a_layer_that_does_not_unpack_to_what_the_configuration_says(self) -> None:
        """Otherwise, an image's id could be given to other content."""

        image = small()
        for data in (gzip.compress(b"another tar"), b"no gzip at all"):
            evil = Blob(image.layers[1].media_type, data)
            manifest = json.loads(image.manifest.data)
            manifest["layers"][1] = evil.descriptor
            top = Blob(image.manifest.media_type, json.dumps(manifest).encode())
            forged = oci.BuiltImage(top, image.config, (image.layers[0], evil), image.diff_ids)
            await self.fails(FailedPrecondition, self.store.pull(self.hostile.serve("forged", forged)))
            self.assert_untouched()

    async def test_a_forged_image_does_not_harm_the_true_one(self) -> None:
        image = small("true")
        true = await self.store.pull(self.registry.push("true", "1", image))
        evil = Blob(image.layers[1].media_type, gzip.compress(b"evil"))
        manifest = json.loads(image.manifest.data)
        manifest["layers"][1] = evil.descriptor
        top = Blob(image.manifest.media_type, json.dumps(manifest).encode())
        forged = oci.BuiltImage(top, image.config, (image.layers[0], evil), image.diff_ids)
        await self.fails(FailedPrecondition, self.store.pull(self.hostile.serve("forged", forged)))
        self.assertEqual(self.store.list(), [true])
        self.assertEqual(self.blobs(), {blob.digest for blob in image.blobs})

    async def test_a_layer_that_unpacks_without_end(self) -> None:
        store = await self.new_store(max_layer_bytes=1 << 20)
        bomb = oci.image([bytes(5 << 20)])
        message = await self.fails(FailedPrecondition, store.pull(self.hostile.serve("bomb", bomb)))
        self.assertIn("images.max_layer_bytes", message)
        self.assertEqual(self.blobs(), set())

    async def test_more_bytes_than_the_manifest_says(self) -> None:
        image = small()
        reference = self.hostile.serve("endless", image)
        self.hostile.put(image.layers[0], "endless", endless(reactor, os.urandom(1 << 16)))
        self.assertIn("more than", await self.fails(FailedPrecondition, self.store.pull(reference)))
        self.assert_untouched()

    @slow(8, "silence is given up after 3 s, twice, lest a busy machine's pause counts as such")
    async def test_no_answer_at_all_is_given_up(self) -> None:
        image = small()
        reference = self.hostile.serve("mute", image)
        self.hostile.answers["/mute/manifests/1"] = hang
        await self.fails(Unavailable, self.store.pull(reference))
        reference = self.hostile.serve("mute", image)
        self.hostile.put(image.layers[0], "mute", begin_then_hang(image.layers[0].data[:50]))
        self.assertIn("sent nothing", await self.fails(Unavailable, self.store.pull(reference)))
        self.assert_untouched()
        self.assertEqual(skopeos(self.directory), [])

    async def test_server_errors_are_unavailable(self) -> None:
        for status in (500, 502, 503, 429):
            self.hostile.answers["/err/manifests/1"] = send(b"", "text/plain", status)
            await self.fails(Unavailable, self.store.pull(f"{self.hostile.host}/err:1"))

    async def test_control_characters_do_not_reach_the_message(self) -> None:
        words = json.dumps({"errors": [{"code": "X", "message": "\x1b[31m\nred\0" + "x" * 5000}]})
        self.hostile.answers["/esc/manifests/1"] = send(words.encode(), "application/json", 400)
        message = await self.fails(InfranetesError, self.store.pull(f"{self.hostile.host}/esc:1"))
        self.assertTrue(message.isprintable(), repr(message))

    async def test_an_index_within_itself(self) -> None:
        def nested(inner: str) -> Blob:
            entry = {"mediaType": oci.OCI + "index.v1+json", "digest": inner, "size": 100}
            document = {"schemaVersion": 2, "mediaType": oci.OCI + "index.v1+json", "manifests": [entry]}
            return Blob(oci.OCI + "index.v1+json", json.dumps(document).encode())

        blob = nested(small().manifest.digest)
        for _ in range(5):
            self.hostile.answers[f"/deep/manifests/{blob.digest}"] = send(blob.data, blob.media_type)
            blob = nested(blob.digest)
        self.hostile.answers["/deep/manifests/1"] = send(blob.data, blob.media_type)
        await self.fails(FailedPrecondition, self.store.pull(f"{self.hostile.host}/deep:1"))
        self.assert_untouched()


class WaitingTests(HostileCase):
    """Several callers for one image, and callers that give up."""

    def slow(self, image: oci.BuiltImage) -> str:
        reference = self.hostile.serve("slow", image)
        self.hostile.put(image.layers[0], "slow", begin_then_hang(image.layers[0].data[:50]))
        return reference

    async def test_two_at_once_are_one_skopeo(self) -> None:
        skopeo, record = self.recording_skopeo()
        store = await self.new_store(skopeo=skopeo)
        reference = self.registry.push("once", "1", small())
        pulls = [self.run_(store.pull(reference)) for _ in range(5)]
        ids = {(await pull).id for pull in pulls}
        self.assertEqual(ids, {small().id})
        self.assertEqual(len(record.read_text().splitlines()), 2, record.read_text())

    async def test_many_images_at_once(self) -> None:
        images = [small(f"many {i}") for i in range(12)]
        names = [self.registry.push("many", str(i), image) for i, image in enumerate(images)]
        pulls = [self.run_(self.store.pull(name)) for name in names]
        self.assertEqual([(await pull).id for pull in pulls], [image.id for image in images])
        self.assertEqual(self.blobs(), {blob.digest for image in images for blob in image.blobs})
        removals = [self.run_(self.store.remove(name)) for name in names]
        again = self.run_(self.store.pull(names[0]))
        for removal in removals:
            await removal
        await again
        left = self.store.list()
        self.assertEqual(self.blobs(), {blob.digest for blob in images[0].blobs} if left else set())

    async def test_who_goes_away_does_not_end_it_for_the_others_the_last_one_does(self) -> None:
        reference = self.slow(small())
        first, second = (self.run_(self.store.pull(reference)) for _ in range(2))
        await until(lambda: any("blobs" in r for r in self.hostile.requests), "a layer is asked for")
        first.cancel()
        await self.fails(CancelledError, first)
        self.assertNotEqual(skopeos(self.directory), [])
        second.cancel()
        await self.fails(CancelledError, second)
        self.assertEqual(skopeos(self.directory), [])
        self.assert_untouched()
        honest = self.hostile.serve("slow", small())
        self.assertEqual((await self.store.pull(honest)).id, small().id)

    async def test_stopping_ends_pulls(self) -> None:
        pull = self.run_(self.store.pull(self.slow(small())))
        await until(lambda: any("blobs" in r for r in self.hostile.requests), "a layer is asked for")
        await self.store.stop()
        await self.fails(Unavailable, pull)
        self.assertEqual(skopeos(self.directory), [])
        self.assert_untouched()

    async def test_images_go_and_come_while_a_pull_is_under_way(self) -> None:
        """A layer that a running pull relies on is not removed in the meantime."""

        image, other = small("go"), small("come")
        await self.store.pull(self.hostile.serve("go", image))
        reference = self.hostile.serve("come", other)
        gate: list[Any] = []

        def wait(request: Any) -> Any:
            gate.append(request)
            return hang(request)

        self.hostile.put(other.layers[1], "come", wait)
        pull = self.run_(self.store.pull(reference))
        await until(lambda: gate, "the gate is reached")
        await self.store.remove(image.id)
        self.assertIn(image.layers[0].digest, self.blobs())  # is in both images
        gate[0].write(other.layers[1].data)
        gate[0].finish()
        self.assertEqual((await pull).id, other.id)
        self.assertEqual(self.blobs(), {blob.digest for blob in other.blobs})


class KilledTests(HostileCase):
    """The daemon gets SIGKILL in the middle of a pull."""

    async def test_skopeo_dies_with_it_and_the_next_start_cleans_up(self) -> None:
        image = small("killed")
        reference = self.hostile.serve("slow", image)
        self.hostile.put(image.layers[1], "slow", begin_then_hang(image.layers[1].data[:50]))
        script = (
            "import sys\n"
            "from twisted.internet import task, defer\n"
            "from infranetes.images import ImageStore, ImagesConfig\n"
            "async def main(reactor):\n"
            "    store = ImageStore(reactor, sys.argv[1], ImagesConfig((sys.argv[3],)))\n"
            "    await store.start()\n"
            "    await store.pull(sys.argv[2])\n"
            "task.react(lambda reactor: defer.Deferred.fromCoroutine(main(reactor)))\n"
        )
        directory = self.directory.with_name("killed")
        arguments = [sys.executable, "-c", script, str(directory), reference, self.hostile.host]
        daemon = subprocess.Popen(arguments, cwd=ROOT)
        try:
            await until(
                lambda: any(image.layers[1].digest in r for r in self.hostile.requests), "it is asked for"
            )
            await until(lambda: list(directory.glob("blobs/sha256/*")), "a blob is stored")
            await until(
                lambda: list(directory.glob("pulls/*/layout/oci-put-blob*")), "the other is half written"
            )
            self.assertNotEqual(skopeos(directory), [])
        finally:
            daemon.send_signal(signal.SIGKILL)
            daemon.wait()
        await until(lambda: not skopeos(directory), "skopeo is killed", 60)
        store = await self.new_store(directory)
        self.assertEqual(store.list(), [])
        self.assertEqual(list(directory.glob("pulls/*")), [])
        self.assertEqual(list(directory.glob("blobs/sha256/*")), [])
        self.assertEqual((await store.pull(self.hostile.serve("slow", image))).id, image.id)

    async def test_between_the_blobs_and_the_index_nothing_counts(self) -> None:
        """If it is killed right before images.json is replaced, the blobs are there, and the image is not."""

        reference = self.hostile.serve("x", small())

        def die(*_: Any) -> None:
            raise OSError(errno.EIO, "as if killed")

        with_it = self.patch(os, "replace", die)
        await self.fails(FailedPrecondition, self.store.pull(reference))
        with_it.restore()
        self.assertEqual((await self.new_store()).list(), [])
        self.assertEqual(self.blobs(), set())
        (self.directory / "images.new").write_bytes(b"torn")
        store = await self.new_store()
        self.assertEqual((await store.pull(reference)).id, small().id)
        self.assertEqual(len(index.load(self.directory / "images.json", self.directory / "blobs/sha256")), 1)


@needs_mounts
class FullDiskTests(StoreCase):
    """A store on a file system of two megabytes."""

    def setUp(self) -> Any:
        self.mount = Path(self.mktemp()).absolute()
        self.mount.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(self.mount)], check=True)
        self.addCleanup(subprocess.run, ["umount", "-l", str(self.mount)], check=True)
        return super().setUp()

    async def begin(self) -> None:
        self.directory = self.mount / "images"
        self.store = await self.new_store(attempts=1)

    def image(self, size: int) -> oci.BuiltImage:
        return oci.image([os.urandom(size)], compression="")

    async def test_an_image_that_does_not_fit_is_refused_with_advice_and_leaves_nothing(self) -> None:
        reference = self.registry.push("big", "1", self.image(3 << 20))
        self.assertIn("remove images", await self.fails(ResourceExhausted, self.store.pull(reference)))
        self.assertEqual(self.blobs(), set())
        self.assert_nothing_left()

    async def test_a_disk_that_fills_up_under_skopeo(self) -> None:
        """Two pulls, each of which fits by itself: the space is gone after it was checked."""

        self.patch(self.store._puller, "_check_room", lambda _: None)
        reference = self.registry.push("big", "1", self.image(3 << 20))
        self.assertIn("full", await self.fails(ResourceExhausted, self.store.pull(reference)))
        self.assertEqual(self.blobs(), set())
        self.assert_nothing_left()
        small_one = await self.store.pull(self.registry.push("small", "1", small()))
        self.assertEqual(self.store.list(), [small_one])

    async def test_on_a_disk_without_one_free_byte_images_can_still_be_removed(self) -> None:
        await self.store.pull(self.registry.push("a", "1", self.image(1 << 20)))
        with contextlib.suppress(OSError):
            (self.mount / "filler").write_bytes(bytes(4 << 20))
        other = self.registry.push("b", "1", small())
        await self.fails(ResourceExhausted, self.store.pull(other))
        self.assertEqual(len(self.store.list()), 1)
        await self.store.remove(self.registry.reference("a", "1"))
        self.assertEqual(self.blobs(), set())
        self.assertEqual((await self.new_store()).list(), [])
        self.assertEqual((await self.store.pull(other)).id, small().id)


@needs_registry
class NeverBlockedTests(StoreCase):
    async def test_other_work_goes_on_while_a_large_layer_is_proven(self) -> None:
        """The reactor turns many times during a pull that keeps a thread busy for long."""

        reference = self.registry.push("large", "1", oci.image([os.urandom(1 << 20) * 30]))
        turns = 0
        pull = self.run_(self.store.pull(reference))
        while not pull.called:
            await sleep(0.01)
            turns += 1
        await pull
        self.assertGreater(turns, 5)
        await self.fails(NotFound, self.store.pull(f"{self.registry.host}/large:2"))
