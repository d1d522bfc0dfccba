# SPDX-License-Identifier: Apache-2.0
"""The archive for `docker load` that a store provides: read by skopeo and loaded by a real dockerd."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

from infranetes.images import archive
from infranetes_common.errors import FailedPrecondition, InvalidArgument, NotFound, Unavailable
from tests.harness.needs import needs_docker, needs_registry
from tests.infranetes.images.support import StoreCase, small
from tests.support import oci
from tests.support.dockerd import Dockerd


async def collect(pieces: Any) -> bytes:
    return b"".join([piece async for piece in pieces])


@needs_registry
class ArchiveTests(StoreCase):
    async def pulled(self, name: str, image: oci.BuiltImage) -> Any:
        return await self.store.pull(self.registry.push(name, "1", image))

    async def test_a_tar_with_manifest_configuration_and_layers(self) -> None:
        image = small()
        got = await self.pulled("tar", image)
        with tarfile.open(fileobj=io.BytesIO(await collect(self.store.archive(got.id)))) as tar:
            read = {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]
        (entry,) = json.loads(read["manifest.json"])
        self.assertEqual(read[entry["Config"]], image.config.data)
        layers = [gzip.decompress(read[name]) for name in entry["Layers"]]
        self.assertEqual(
            ["sha256:" + hashlib.sha256(one).hexdigest() for one in layers], list(image.diff_ids)
        )

    async def test_one_with_more_layers_than_docker_takes_is_refused(self) -> None:
        got = await self.pulled("high", oci.image([oci.layer({f"{n}": b""}) for n in range(3)]))
        self.patch(archive, "DOCKER_LAYERS", 3)
        await collect(self.store.archive(got.id))
        self.patch(archive, "DOCKER_LAYERS", 2)
        message = await self.fails(FailedPrecondition, collect(self.store.archive(got.id)))
        self.assertIn("has 3 layers, Docker stacks 2", message)

    async def test_skopeo_finds_the_same_image_in_it_whatever_the_layers_were(self) -> None:
        for compression in ("gzip", "zstd", ""):
            image = small(compression, compression=compression)
            got = await self.pulled(f"kind-{compression or 'plain'}", image)
            file = Path(self.mktemp()).absolute()
            file.write_bytes(await collect(self.store.archive(got.id)))
            out = file.with_name("out")
            arguments = [
                "skopeo",
                "--insecure-policy",
                "copy",
                "-q",
                f"docker-archive:{file}",
                f"dir:{out}",
            ]
            subprocess.run(arguments, check=True)
            config = json.loads((out / "manifest.json").read_text())["config"]["digest"]
            self.assertEqual(config, image.id)
            shutil.rmtree(out)

    async def test_lower_layers_that_are_there_are_named_but_left_out(self) -> None:
        got = await self.pulled("present", small())
        for present, expected in ((0, ["000.tar", "001.tar"]), (1, ["001.tar"]), (2, [])):
            data = await collect(self.store.archive(got.id, present))
            with tarfile.open(fileobj=io.BytesIO(data)) as tar:
                self.assertEqual(tar.getnames()[2:], expected)
                (entry,) = json.loads(tar.extractfile("manifest.json").read())  # type: ignore[union-attr]
                self.assertEqual(len(entry["Layers"]), 2)
        for present in (-1, 3):
            await self.fails(InvalidArgument, collect(self.store.archive(got.id, present)))
        await self.fails(NotFound, collect(self.store.archive("sha256:" + "0" * 64)))

    async def test_pieces_are_small(self) -> None:
        image = oci.image([os.urandom(3_000_001)], compression="")
        got = await self.pulled("pieces", image)
        sizes = [len(piece) async for piece in self.store.archive(got.id)]
        self.assertLessEqual(max(sizes), 256 * 1024)
        self.assertLess(len(sizes), 30)

    async def test_the_same_layer_twice(self) -> None:
        layer = oci.layer({"x": b"1"})
        got = await self.pulled("twice", oci.image([layer, layer]))
        with tarfile.open(fileobj=io.BytesIO(await collect(self.store.archive(got.id)))) as tar:
            self.assertEqual(tar.getnames()[2:], ["000.tar", "001.tar"])

    async def test_an_image_that_is_removed_meanwhile_is_streamed_to_its_end_then_its_blobs_go(self) -> None:
        got = await self.pulled("meanwhile", oci.image([os.urandom(1_000_000)], compression=""))
        pieces: Any = self.store.archive(got.id)
        data = await pieces.__anext__()
        await self.store.remove(got.id)
        self.assertEqual(len(self.blobs()), 2)
        data += await collect(pieces)
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            self.assertEqual(len(tar.getmembers()), 3)
        self.assertEqual(self.blobs(), set())

    async def test_a_stream_that_is_left_early_lets_go(self) -> None:
        got = await self.pulled("early", oci.image([os.urandom(1_000_000)], compression=""))
        pieces: Any = self.store.archive(got.id)
        for _ in range(3):
            await pieces.__anext__()
        await self.store.remove(got.id)
        await pieces.aclose()
        self.assertEqual(self.blobs(), set())
        held = [
            os.readlink(f"/proc/self/fd/{fd}")
            for fd in os.listdir("/proc/self/fd")
            if os.path.lexists(f"/proc/self/fd/{fd}")
        ]
        self.assertFalse([name for name in held if str(self.directory) in name])

    async def test_a_blob_that_is_damaged_is_an_error_not_a_wrong_archive(self) -> None:
        image = small()
        got = await self.pulled("damaged", image)
        path = self.directory / "blobs" / "sha256" / image.layers[0].digest[7:]
        path.write_bytes(path.read_bytes()[:-5])
        await self.fails(Unavailable, collect(self.store.archive(got.id)))
        path.unlink()
        await self.fails(Unavailable, collect(self.store.archive(got.id)))


@needs_docker
class DockerTests(StoreCase):
    """Docker reads the archive in the guest; here, by an engine of this test alone."""

    timeout = 180

    def setUp(self) -> Any:
        self.engine = Dockerd()
        self.addCleanup(self.engine.stop)
        self.engine.start()
        return super().setUp()

    def load(self, data: bytes) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            ["docker", "-H", f"unix://{self.engine.socket}", "load"], input=data, capture_output=True
        )

    async def test_it_loads_under_the_same_id_also_without_layers_that_it_has(self) -> None:
        base = oci.layer({"base": b"base" * 1000})
        first = oci.image([base, oci.layer({"a": b"1"})], compression="zstd")
        second = oci.image([base, oci.layer({"b": b"2"}), oci.layer({"c": b"3"})])
        for image in (first, second):
            await self.store.pull(self.registry.push("docker", "1", image))
        loaded = self.load(await collect(self.store.archive(second.id, 1)))
        self.assertNotEqual(loaded.returncode, 0)  # it does not have that layer yet
        loaded = self.load(await collect(self.store.archive(first.id)))
        self.assertIn(first.id.encode(), loaded.stdout, loaded.stderr)
        without = await collect(self.store.archive(second.id, 1))
        self.assertNotIn("000.tar", tarfile.open(fileobj=io.BytesIO(without)).getnames())  # noqa: SIM115
        loaded = self.load(without)
        self.assertIn(second.id.encode(), loaded.stdout, loaded.stderr)
