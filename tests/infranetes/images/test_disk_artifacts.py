# SPDX-License-Identifier: Apache-2.0
"""Artifacts of a registry that are machines' disks, in the node's image store."""

from __future__ import annotations

import json
from pathlib import Path

from infranetes_common.errors import FailedPrecondition, NotFound
from tests.harness.needs import needs_programs
from tests.infranetes.images.support import StoreCase, small
from tests.support import oci

DISK = b"QFI\xfb" + bytes(3000)


@needs_programs("skopeo", "docker-registry")
class DiskArtifactTests(StoreCase):
    async def test_it_is_pulled_and_listed_under_the_digest_of_its_manifest(self) -> None:
        """Its configuration is the one of all such artifacts."""
        first = oci.disk(DISK)
        second = oci.disk(DISK + b"2", config_type="application/vnd.unknown.config.v1+json", says_kind=False)
        images = [
            await self.store.pull(self.registry.push(f"disk{number}", "1", built))
            for number, built in enumerate((first, second))
        ]
        self.assertEqual([image.id for image in images], [first.manifest.digest, second.manifest.digest])
        self.assertEqual(self.store.list(), images)
        self.assertEqual(images[0].repo_tags, (self.registry.reference("disk0", "1"),))
        self.assertEqual(self.store.resolve(images[0].id[:15]), images[0])
        self.assertEqual(await self.store.config(images[0].id), b"{}")

    async def test_its_file_is_the_layer(self) -> None:
        built = oci.disk(DISK)
        image = await self.store.pull(self.registry.push("disk", "1", built))
        files = self.store.files(image.id)
        self.assertEqual((files.disk, files.digest), (True, built.layers[0].digest))
        self.assertEqual([each.path.read_bytes() for each in files.layers], [DISK])

    async def test_it_is_found_by_the_next_daemon_and_removed_with_its_blobs(self) -> None:
        image = await self.store.pull(self.registry.push("disk", "1", oci.disk(DISK)))
        again = await self.new_store()
        self.assertEqual(again.list(), [image])
        await again.remove(image.id)
        self.assertEqual(self.blobs(), set())

    async def test_it_is_nothing_that_containers_are_made_of(self) -> None:
        await self.store.disks((await self.store.pull(self.registry.push("web", "1", small()))).id)
        image = await self.store.pull(self.registry.push("disk", "1", oci.disk(DISK)))
        for words in (
            await self.fails(FailedPrecondition, self.store.disks(image.id)),
            await self.fails(FailedPrecondition, anext(self.store.archive(image.id))),
        ):
            self.assertIn('images = "machine"', words)

    async def test_a_configuration_that_is_anything_is_told_as_none(self) -> None:
        config = oci.Blob("application/vnd.example", b"no JSON")
        disk = oci.disk(DISK)
        document = json.loads(disk.manifest.data) | {"config": config.descriptor}
        manifest = oci.Blob(disk.manifest.media_type, json.dumps(document).encode())
        built = oci.BuiltImage(manifest, config, disk.layers, ())
        image = await self.store.pull(self.registry.push("disk", "1", built))
        self.assertEqual(await self.store.config(image.id), b"{}")

    async def test_a_damaged_one_is_refused(self) -> None:
        built = oci.disk(DISK)
        name = self.registry.push("disk", "1", built)
        self.registry.blob_path(built.layers[0].digest).write_bytes(DISK[::-1])
        store = await self.new_store(Path(self.mktemp()).absolute(), attempts=1)
        with self.assertRaisesRegex(Exception, "does not match|digest"):
            await store.pull(name)
        self.assertEqual(store.list(), [])

    async def test_what_is_made_beside_images_is_told_which_there_are(self) -> None:
        told: list[set[str]] = []

        async def sweep(ids: object) -> None:
            assert isinstance(ids, set)
            told.append(ids & {image.id})

        image = await self.store.pull(self.registry.push("disk", "1", oci.disk(DISK)))
        self.store.sweep_beside(sweep)
        async with self.store.held(image.id):
            await self.store.remove(image.id)
        self.assertEqual(told, [{image.id}, set()])
        self.assertRaises(NotFound, self.store.files, image.id)

    async def test_a_container_images_files_are_its_layers(self) -> None:
        built = small()
        image = await self.store.pull(self.registry.push("web", "1", built))
        files = self.store.files(image.id)
        self.assertEqual(
            [(each.path.name, each.compression) for each in files.layers],
            [(blob.digest.removeprefix("sha256:"), "gzip") for blob in built.layers],
        )
        self.assertFalse(files.disk)
        self.assertEqual(json.loads(await self.store.config(image.id))["os"], "linux")
