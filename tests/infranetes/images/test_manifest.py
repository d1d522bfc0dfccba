# SPDX-License-Identifier: Apache-2.0
"""How registries' documents are parsed, both correct and hostile ones."""

from __future__ import annotations

import contextlib
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from infranetes.images import manifest
from infranetes.images.manifest import MAX_MANIFEST_BYTES, Manifest, read, read_config, require_platform
from infranetes_common.errors import FailedPrecondition, NotFound
from tests.harness.needs import needs_programs
from tests.support import oci
from tests.support.peak import peak

AMD64 = "linux/amd64"


def built(**options: Any) -> oci.BuiltImage:
    return oci.image([oci.layer({"a": b"1"}), oci.layer({"b": b"2"})], {"User": "app:app"}, **options)


class ReadTests(SynchronousTestCase):
    def reading(self, document: Any) -> Manifest | str:
        return read(json.dumps(document).encode(), AMD64, "x")

    @needs_programs("zstd")
    def test_both_flavours_and_all_compressions(self) -> None:
        for flavour in ("oci", "docker"):
            for compression in ("gzip", "zstd", ""):
                image = built(flavour=flavour, compression=compression)
                got = read(image.manifest.data, AMD64, "x")
                assert isinstance(got, Manifest)
                self.assertEqual(got.digest, image.manifest.digest)
                self.assertEqual(got.config_digest, image.id)
                self.assertEqual(
                    [(layer.digest, layer.size, layer.compression) for layer in got.layers],
                    [(blob.digest, len(blob.data), compression) for blob in image.layers],
                )

    def test_an_index_leads_to_the_platform(self) -> None:
        images = [built(architecture=a) for a in ("arm64", "amd64", "s390x")]
        for flavour in ("oci", "docker"):
            index = oci.index(images, flavour=flavour).top.data
            self.assertEqual(read(index, AMD64, "x"), images[1].manifest.digest)
            self.assertEqual(read(index, "linux/s390x", "x"), images[2].manifest.digest)

    def test_architectures_are_known_by_other_spellings(self) -> None:
        for spelling in ("x86_64", "AMD64", "x86-64"):
            image = built(architecture=spelling)
            self.assertEqual(read(oci.index([image]).top.data, AMD64, "x"), image.manifest.digest)
        index = oci.index([built(architecture="aarch64")]).top.data
        self.assertIn("it has linux/arm64", str(self.assertRaises(NotFound, read, index, AMD64, "x")))

    def test_an_index_without_the_platform_says_what_it_has(self) -> None:
        index = oci.index([built(architecture="arm64")]).top.data
        self.assertIn("linux/arm64", str(self.assertRaises(NotFound, read, index, AMD64, "x")))

    def test_attestations_are_not_taken_for_images(self) -> None:
        index = json.loads(oci.index([built()]).top.data)
        index["manifests"].insert(
            0, {**index["manifests"][0], "platform": {"os": "unknown", "architecture": "unknown"}}
        )
        self.assertEqual(self.reading(index), built().manifest.digest)

    def test_an_index_that_says_no_platform_leads_to_its_only_image(self) -> None:
        """The image's configuration says it. One for the platform comes first, wherever it is."""
        index = json.loads(oci.index([built(), built(architecture="arm64")]).top.data)
        ours, other = index["manifests"]
        cases: tuple[dict[str, None], ...] = ({}, {"platform": None})
        for platform in cases:
            plain = {**{key: value for key, value in other.items() if key != "platform"}, **platform}
            self.assertEqual(self.reading({**index, "manifests": [plain]}), other["digest"])
            self.assertEqual(self.reading({**index, "manifests": [plain, ours]}), ours["digest"])
        self.assertRaises(NotFound, self.reading, {**index, "manifests": None})

    def test_an_index_in_an_index_may_say_its_platform(self) -> None:
        nested = json.loads(oci.index([built()]).top.data)["manifests"][0]
        nested["mediaType"] = "application/vnd.oci.image.index.v1+json"
        index = {"schemaVersion": 2, "mediaType": nested["mediaType"]}
        self.assertEqual(self.reading({**index, "manifests": [nested]}), nested["digest"])
        for other in ({"os": "linux", "architecture": "arm64"}, {"os": "unknown", "architecture": "unknown"}):
            wrong = {**nested, "platform": other}
            self.assertRaises(NotFound, self.reading, {**index, "manifests": [wrong]})

    def test_schema_1_is_refused_with_advice(self) -> None:
        error = self.assertRaises(FailedPrecondition, self.reading, {"schemaVersion": 1, "fsLayers": []})
        self.assertIn("push it again", str(error))

    def test_an_artifact_is_no_image(self) -> None:
        document = json.loads(built().manifest.data)
        document["config"]["mediaType"] = "application/vnd.cncf.helm.config.v1+json"
        error = self.assertRaises(FailedPrecondition, self.reading, document)
        self.assertIn("not a container image", str(error))

    def test_an_artifact_of_one_layer_may_be_a_disk_for_who_takes_disks(self) -> None:
        for config_type, layer_type in (
            (oci.OCI + "empty.v1+json", "application/x-qcow2"),
            (oci.OCI + "empty.v1+json", oci.OCI + "layer.v1.tar"),  # what oras says of a file by default
            ("application/vnd.unknown.config.v1+json", "application/octet-stream"),
            (oci.OCI + "config.v1+json", "application/x-qemu-qcow2+zstd"),
        ):
            artifact = oci.disk(b"QFI", config_type=config_type, layer_type=layer_type)
            got = read(artifact.manifest.data, AMD64, "x", disks=True)
            assert isinstance(got, Manifest)
            self.assertTrue(got.disk, layer_type)
            self.assertEqual(set(got.blobs), {artifact.layers[0].digest, artifact.id})
            self.assertRaises(FailedPrecondition, read, artifact.manifest.data, AMD64, "x")

    def test_other_artifacts_and_images_are_no_disks(self) -> None:
        image = read(built().manifest.data, AMD64, "x", disks=True)
        assert isinstance(image, Manifest)
        self.assertFalse(image.disk)
        chart = oci.disk(
            b"",
            config_type="application/vnd.cncf.helm.config.v1+json",
            layer_type="application/vnd.cncf.helm.chart.content.v1.tar+gzip",
        )
        document = json.loads(oci.disk(b"").manifest.data)
        two = json.dumps({**document, "layers": 2 * document["layers"]}).encode()
        for data in (chart.manifest.data, two):
            error = self.assertRaises(FailedPrecondition, read, data, AMD64, "x", disks=True)
            self.assertIn("nor an artifact with one layer", str(error))

    def test_layers_that_docker_could_not_load_are_refused(self) -> None:
        for kind in ("application/vnd.oci.image.layer.v1.tar+gzip+encrypted", "text/html"):
            document = json.loads(built().manifest.data)
            document["layers"][1]["mediaType"] = kind
            self.assertIn(kind, str(self.assertRaises(FailedPrecondition, self.reading, document)))

    def test_layers_that_are_not_for_everybody_to_hand_on_are_layers(self) -> None:
        for kind, compression in (
            ("application/vnd.oci.image.layer.nondistributable.v1.tar", ""),
            ("application/vnd.oci.image.layer.nondistributable.v1.tar+gzip", "gzip"),
            ("application/vnd.oci.image.layer.nondistributable.v1.tar+zstd", "zstd"),
            ("application/vnd.docker.image.rootfs.foreign.diff.tar.gzip", "gzip"),
        ):
            document = json.loads(built().manifest.data)
            document["layers"][1]["mediaType"] = kind
            got = self.reading(document)
            assert isinstance(got, Manifest)
            self.assertEqual(got.layers[1].compression, compression)

    def test_more_layers_than_can_be_stacked_are_refused(self) -> None:
        document = json.loads(built().manifest.data)
        document["layers"] *= 100
        highest = self.reading(document)
        assert isinstance(highest, Manifest)
        self.assertEqual(len(highest.layers), 200)
        document["layers"].append(document["layers"][0])
        error = self.assertRaises(FailedPrecondition, self.reading, document)
        self.assertIn("201 layers, 200 can be stacked", str(error))

    def test_garbage_is_refused_in_words(self) -> None:
        deep = b'{"a":' * 100_000
        huge = b'{"mediaType": "' + b"x" * manifest.MAX_MANIFEST_BYTES + b'"}'
        for data in (b"", b"\xff", b"[]", b"1", b"{}", b"null", b"<html>", deep, huge):
            error = self.assertRaises(FailedPrecondition, read, data, AMD64, "x")
            self.assertLess(len(str(error)), 300)

    def test_any_single_wrong_value_is_refused_or_harmless(self) -> None:
        for path in (("config",), ("layers",), ("layers", 0), ("config", "digest"), ("config", "size"),
                     ("config", "mediaType"), ("layers", 0, "digest"), ("layers", 0, "size"),
                     ("layers", 0, "mediaType")):  # fmt: skip
            wrong: object
            for wrong in (None, True, -1, 1.5, "../../etc/passwd", "sha256:../../x", 1 << 60, {}, []):
                if (path, wrong) in ((("layers",), []), (("layers",), None)):
                    continue  # an image need not have layers
                document: Any = json.loads(built().manifest.data)
                at = document
                for key in path[:-1]:
                    at = at[key]
                at[path[-1]] = wrong
                self.assertRaises(FailedPrecondition, self.reading, document)

    @given(st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
            st.sampled_from(["schemaVersion", "mediaType", "config", "layers", "manifests", "digest", "size",
                             "platform", "os", "architecture"]), inner, max_size=6),
        max_leaves=20,
    ))  # fmt: skip
    def test_nothing_else_than_these_errors_comes_out(self, document: Any) -> None:
        with contextlib.suppress(FailedPrecondition, NotFound):
            self.reading(document)


class ManyValuesTests(SynchronousTestCase):
    def test_what_would_take_much_memory_is_refused(self) -> None:
        document = b'{"layers": [' + b"{}," * (MAX_MANIFEST_BYTES // 3 - 20) + b"{}]}"
        self.assertLess(
            peak(lambda: self.assertRaises(FailedPrecondition, read, document, AMD64, "x")), 1 << 20
        )


class ConfigTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.image = built()
        got = read(self.image.manifest.data, AMD64, "x")
        assert isinstance(got, Manifest)
        self.manifest = got

    def test_layers_user_and_platform(self) -> None:
        config = read_config(self.image.config.data, self.manifest, "x")
        self.assertEqual(config.diff_ids, self.image.diff_ids)
        self.assertEqual(config.user, "app:app")
        self.assertEqual(config.platform, "linux/amd64")

    def test_null_is_as_if_it_were_not_there(self) -> None:
        document = json.loads(self.image.config.data)
        document["config"]["User"] = document["architecture"] = document["os"] = None
        found = read_config(json.dumps(document).encode(), self.manifest, "x")
        self.assertEqual((found.user, found.platform), ("", "/"))
        document["config"] = None
        self.assertEqual(read_config(json.dumps(document).encode(), self.manifest, "x").user, "")

    def test_an_image_of_nothing_may_say_so_by_null(self) -> None:
        document = json.loads(oci.image([]).manifest.data)
        found = read(json.dumps({**document, "layers": None}).encode(), AMD64, "x")
        assert isinstance(found, Manifest)
        self.assertEqual(found.layers, ())
        rootfs: Any
        for rootfs in ({"type": "layers", "diff_ids": None}, {"type": "layers"}, {"diff_ids": []}):
            data = json.dumps({"rootfs": rootfs}).encode()
            self.assertEqual(read_config(data, found, "x").diff_ids, ())

    def test_it_must_have_as_many_layers_as_the_manifest(self) -> None:
        document = json.loads(self.image.config.data)
        document["rootfs"]["diff_ids"].pop()
        self.assertRaises(FailedPrecondition, read_config, json.dumps(document).encode(), self.manifest, "x")

    def test_garbage_is_refused(self) -> None:
        wrong: Any
        for wrong in ({}, {"rootfs": []}, {"rootfs": {"diff_ids": [1, 2]}}, {"rootfs": {"diff_ids": None}}):
            self.assertRaises(FailedPrecondition, read_config, json.dumps(wrong).encode(), self.manifest, "x")
        user: Any
        for user in (1, [], "x" * 1000):
            document = json.loads(self.image.config.data)
            document["config"]["User"] = user
            self.assertRaises(
                FailedPrecondition, read_config, json.dumps(document).encode(), self.manifest, "x"
            )

    def test_another_platform_is_refused_an_unnamed_one_is_taken(self) -> None:
        arm = built(architecture="arm64")
        config = read_config(arm.config.data, self.manifest, "x")
        self.assertIn(
            "linux/arm64", str(self.assertRaises(FailedPrecondition, require_platform, config, AMD64, "x"))
        )
        for taken in ("", "x86_64"):
            config = read_config(built(architecture=taken).config.data, self.manifest, "x")
            require_platform(config, AMD64, "x")
