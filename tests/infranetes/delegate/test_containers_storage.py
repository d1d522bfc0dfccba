# SPDX-License-Identifier: Apache-2.0
"""Images in a containers/storage that skopeo has written, as CRI-O reports them."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from google.protobuf.message import Message
from twisted.internet.defer import Deferred
from twisted.internet.threads import deferToThread
from twisted.trial.unittest import SynchronousTestCase

from infranetes.delegate import containers_storage
from infranetes.delegate.containers_storage import ContainersStorage, StoredLayer
from infranetes.delegate.crio_content import PARTIAL, CrioContent
from infranetes.delegate.layer_source import ILayerSource, LayersMissing, Runtime
from infranetes.images import ImagesConfig, manifest
from infranetes.images.manifest import host_platform
from infranetes_common.concurrency import start
from infranetes_common.errors import DataLoss, FailedPrecondition, NotFound, Unavailable
from infranetes_common.wire import cri
from tests.contract import layer_source
from tests.harness.needs import needs_mounts, needs_programs
from tests.harness.tools import need
from tests.infranetes.delegate.content_case import ImagesCase, reactor
from tests.infranetes.images.support import small
from tests.support.oci import BuiltImage, BuiltIndex

DIFF_ID = "sha256:" + "a" * 64


class Storage:
    """A `Runtime`: a containers/storage, and the part of CRI-O that reports its images.

    The driver is vfs, which does not need mounts."""

    def __init__(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="storage-"))
        self.place = f"{self.root}/s/vfs-images"
        Path(self.place).mkdir(parents=True)
        self._names: dict[str, str] = {}  # ids by name

    @property
    def layers(self) -> Path:
        """The file that lists layers."""
        return self.root / "s" / "vfs-layers" / "layers.json"

    def pull(self, name: str, built: BuiltImage | BuiltIndex) -> str:
        """Pull an image under a name. Return the full name."""
        source, reference = self.root / "image", f"localhost/{name}:1"
        self._write(source, built)
        self._skopeo("copy", "--quiet", "--multi-arch=system", f"oci:{source}", self._inside(reference))
        listed = json.loads((self.root / "s" / "vfs-images" / "images.json").read_bytes())
        [self._names[reference]] = [each["id"] for each in listed if reference in each.get("names", ())]
        return reference

    def remove(self, id: str) -> None:
        self._names = {name: each for name, each in self._names.items() if each != id}
        self._skopeo("delete", self._inside(f"@{id}"))

    def files(self, diff_id: str) -> Path:
        """Return the directory into which a layer is unpacked."""
        [id] = [each["id"] for each in json.loads(self.layers.read_bytes()) if each["diff-digest"] == diff_id]
        return self.root / "s" / "vfs" / "dir" / str(id)

    async def call(self, path: str, request: bytes, *, timeout: float) -> bytes:
        """Answer as CRI-O does."""
        answer: Message
        if path.endswith("/ImageFsInfo"):
            place = cri.FilesystemIdentifier(mountpoint=self.place)
            answer = cri.ImageFsInfoResponse(image_filesystems=[cri.FilesystemUsage(fs_id=place)])
        elif path.endswith("/ListImages"):
            answer = cri.ListImagesResponse(images=[self._told(id) for id in sorted({*self._names.values()})])
        else:
            wanted = cri.ImageStatusRequest.FromString(request).image.image
            id = self._names.get(wanted, wanted)
            answer = cri.ImageStatusResponse(image=self._told(id) if id in self._names.values() else None)
        return answer.SerializeToString()

    def _told(self, id: str) -> cri.Image:
        return cri.Image(id=id, repo_tags=[name for name, each in self._names.items() if each == id], size=1)

    def _inside(self, name: str) -> str:
        return f"containers-storage:[vfs@{self.root}/s+{self.root}/run]{name}"

    def _skopeo(self, *words: str) -> None:
        policy = self.root / "policy.json"
        policy.write_text('{"default": [{"type": "insecureAcceptAnything"}]}')
        command = [need("skopeo"), "--policy", str(policy), *words]
        done = subprocess.run(command, capture_output=True, text=True, env={"TMPDIR": str(self.root)})
        assert done.returncode == 0, done.stderr

    def _write(self, directory: Path, built: BuiltImage | BuiltIndex) -> None:
        shutil.rmtree(directory, ignore_errors=True)
        blobs = directory / "blobs" / "sha256"
        blobs.mkdir(parents=True)
        for blob in (*built.blobs, *built.manifests):
            (blobs / blob.digest.removeprefix("sha256:")).write_bytes(blob.data)
        (directory / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
        index = {"schemaVersion": 2, "manifests": [built.top.descriptor]}
        (directory / "index.json").write_text(json.dumps(index))


@needs_programs("skopeo")
class StorageCase(ImagesCase):
    """An empty storage."""

    async def begin(self) -> Runtime:
        self.storage = Storage()
        self.addCleanup(shutil.rmtree, self.storage.root)
        return self.storage

    def source(self) -> ILayerSource:
        return CrioContent(reactor, self.runtime, self.directory / "tars", host_platform())

    async def pulled(self, name: str, built: BuiltImage | BuiltIndex, tag: str = "1") -> str:
        return str(await deferToThread(self.storage.pull, name, built))

    def remove(self, name: str) -> Deferred[Any]:
        return deferToThread(self.storage.remove, name)

    def spelled(self, image_id: str) -> str:
        return image_id.removeprefix("sha256:")


@needs_mounts
class ContractTests(layer_source.LayerSourceContract, StorageCase):
    """The contract that holds for every runtime."""


class BoundsTests(SynchronousTestCase):
    """What is read is bounded, and validated before it is used."""

    def setUp(self) -> None:
        self.storage = ContainersStorage(Path(self.mktemp()).absolute(), "overlay")
        self.layers = self.storage.root / "overlay-layers"
        self.image = self.storage.root / "overlay-images" / ("0" * 64)
        for directory in (self.layers, self.image):
            directory.mkdir(parents=True)
        (self.layers / f"{'1' * 64}.tar-split.gz").touch()
        (self.storage.root / "x.tar-split.gz").touch()

    def listed(self, listed: object) -> Mapping[str, StoredLayer]:
        """Return what the storage has of the layer DIFF_ID."""
        (self.layers / "layers.json").write_text(json.dumps(listed))
        return self.storage.thd_layers([DIFF_ID])

    def test_a_layer_counts_only_as_it_should_be(self) -> None:
        whole = {"id": "1" * 64, "diff-digest": DIFF_ID, "diff-size": 1024}
        self.assertEqual(self.listed([{"id": "2"}, whole]), {DIFF_ID: StoredLayer("1" * 64, 1024)})
        for wrong in (
            {"id": "2" * 64},  # lacks its description
            {"id": "../x"},
            {"id": None},
            {"diff-size": 0},
            {"diff-size": -1},
            {"diff-size": "1024"},
            {"diff-digest": "sha256:" + "0" * 64},
            {"flags": {"incomplete": True}},
        ):
            self.assertEqual(self.listed([{**whole, **wrong}]), {}, wrong)
        for damaged in ({"a": 1}, 7, ["x"], [{**whole, "diff-digest": []}], [{**whole, "flags": 7}]):
            with self.assertRaises(Unavailable, msg=repr(damaged)):
                self.listed(damaged)
        self.patch(containers_storage, "MAX_LAYERS_BYTES", 100)
        with self.assertRaises(DataLoss):
            self.listed([whole])

    def test_no_image_is_outside_of_the_directory_of_images(self) -> None:
        for id in ("", "..", "sha256:..", "sha256:" + "0" * 63 + "/", "../" * 21 + "0"):
            with self.assertRaises(NotFound):
                self.storage.thd_manifest(id)

    def test_what_an_image_consists_of_is_bounded(self) -> None:
        id = f"sha256:{self.image.name}"
        with (self.image / "manifest").open("wb") as out:
            out.truncate(manifest.MAX_MANIFEST_BYTES)
            self.assertEqual(len(self.storage.thd_manifest(id)), manifest.MAX_MANIFEST_BYTES)
            out.truncate(manifest.MAX_MANIFEST_BYTES + 1)
            with self.assertRaises(DataLoss):
                self.storage.thd_manifest(id)


@needs_mounts
class DamageTests(StorageCase):
    """Contents of a storage from which no VM image can be made."""

    async def test_what_is_not_as_it_was_unpacked_is_not_used(self) -> None:
        built = small("damaged")
        image = await self.images.find(await self.pulled("damaged", built))
        top = self.storage.files(built.diff_ids[1]) / "top"
        content = top.read_bytes()
        top.write_bytes(content.upper())
        await self.assertFailure(start(self.images.disks(image.id)), FailedPrecondition)
        top.write_bytes(content + b"!")
        await self.assertFailure(start(self.images.disks(image.id)), DataLoss)
        top.unlink()
        top.symlink_to("/etc/hostname")
        await self.assertFailure(start(self.images.disks(image.id)), DataLoss)
        top.unlink()
        top.write_bytes(content)
        self.assert_right(await self.images.disks(image.id), built.diff_ids)
        self.assertEqual([*(self.directory / "tars").iterdir()], [])

    async def test_a_layer_that_is_too_large_is_not_even_written(self) -> None:
        image = await self.images.find(await self.pulled("large", small("large")))
        self.images.reconfigure(ImagesConfig(max_layer_bytes=1024))
        self.patch(ContainersStorage, "thd_write", None)
        error = await self.assertFailure(start(self.images.disks(image.id)), FailedPrecondition)
        self.assertIn("images.max_layer_bytes", str(error))

    async def test_a_layer_that_is_not_all_there_is_refused_with_what_to_do(self) -> None:
        built = small("partial")
        image = await self.images.find(await self.pulled("partial", built))
        listed = json.loads(self.storage.layers.read_bytes())
        listed[0]["flags"] = {"incomplete": True}
        self.storage.layers.write_text(json.dumps(listed))
        error = await self.assertFailure(start(self.images.disks(image.id)), LayersMissing)
        for words in (image.id, "crictl rmi", "enable_partial_images"):
            self.assertIn(words, str(error))
        self.assertEqual(await self.images.refusal(), PARTIAL)

    async def test_storage_of_another_driver_is_refused_in_one_sentence(self) -> None:
        self.storage.place = "/var/lib/containers/storage/zfs-images"
        self.assertIn("storage_driver", await self.images.refusal())
        self.storage.place = "/nowhere/overlay-images"
        self.assertIn("can't see", await self.images.refusal())
