# SPDX-License-Identifier: Apache-2.0
"""The image store with a real registry: what is pulled, found, kept and removed."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from typing import Any

import attrs

from infranetes.images import ImagesConfig, RegistryCredentials, credentials
from infranetes_common.config import structure
from infranetes_common.errors import (
    ConfigError,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
)
from tests.harness.needs import needs_registry
from tests.infranetes.images.support import StoreCase, small
from tests.support import oci
from tests.support.registry import Registry


@needs_registry
class PullTests(StoreCase):
    async def test_reference_id_and_digest_agree_in_every_answer(self) -> None:
        image = small("agree", config={"User": "1000:7"})
        reference = self.registry.push("agree", "v1", image)
        got = await self.store.pull(reference)
        digest = f"{self.registry.host}/agree@{image.manifest.digest}"
        self.assertEqual(got.id, image.id)
        self.assertEqual(got.repo_tags, (reference,))
        self.assertEqual(got.repo_digests, (digest,))
        self.assertEqual(got.diff_ids, image.diff_ids)
        self.assertEqual(got.size, sum(len(blob.data) for blob in image.blobs))
        self.assertEqual((got.user, got.uid, got.username), ("1000:7", 1000, ""))
        bare = image.id.removeprefix("sha256:")
        for name in (
            reference,
            digest,
            image.id,
            bare,
            bare[:6],
            image.id[:20],
            f"{reference}@{image.manifest.digest}",
        ):
            self.assertEqual(self.store.resolve(name), got, name)
        self.assertEqual(self.store.list(), [got])
        self.assertEqual(await self.store.config(got.id), image.config.data)
        self.assert_nothing_left()

    async def test_every_kind_of_layer_and_manifest_keeps_the_id_of_its_configuration(self) -> None:
        for flavour, compressions in (("oci", ("gzip", "zstd", "")), ("docker", ("gzip", "zstd", ""))):
            for compression in compressions:
                image = small(flavour=flavour, compression=compression)
                name = f"kind-{flavour}-{compression or 'plain'}"
                got = await self.store.pull(self.registry.push(name, "1", image))
                self.assertEqual((got.id, got.diff_ids), (image.id, image.diff_ids))
                self.assertEqual(got.repo_digests[-1].rpartition("@")[2][:7], "sha256:")

    async def test_layers_are_what_their_bytes_are_whatever_the_manifest_says(self) -> None:
        for compression in ("gzip", "zstd", ""):
            for said in {"gzip", "zstd", ""} - {compression}:
                image = small(compression=compression, said=said)
                reference = self.registry.push(f"is-{compression}-said-{said}x", "1", image)
                got = await self.store.pull(reference)
                self.assertEqual((got.id, got.diff_ids), (image.id, image.diff_ids))
                [record] = [each for each in self.store._records.values() if each.id == got.id]
                self.assertEqual({each.compression for each in record.manifest.layers}, {compression})

    async def test_a_layer_that_is_not_for_everybody_to_hand_on_comes_from_the_registry(self) -> None:
        made = small()
        document = json.loads(made.manifest.data)
        document["layers"][1]["mediaType"] = f"{oci.OCI}layer.nondistributable.v1.tar+gzip"
        manifest = oci.Blob(made.manifest.media_type, json.dumps(document).encode())
        image = attrs.evolve(made, manifest=manifest)
        got = await self.store.pull(self.registry.push("not-to-hand-on", "1", image))
        self.assertEqual((got.id, got.diff_ids), (image.id, image.diff_ids))

    async def test_of_an_index_the_platforms_image_under_the_indexs_digest(self) -> None:
        for flavour in ("oci", "docker"):
            ours, other = (
                small("ours", flavour=flavour),
                small("other", architecture="arm64", flavour=flavour),
            )
            index = oci.index([other, ours], flavour=flavour)
            name = f"index-{flavour}"
            got = await self.store.pull(self.registry.push(name, "1", index))
            self.assertEqual(got.id, ours.id)
            self.assertIn(f"{self.registry.host}/{name}@{index.top.digest}", got.repo_digests)
            again = await self.store.pull(f"{self.registry.host}/{name}@{index.top.digest}")
            self.assertEqual(again.id, ours.id)
            self.assertNotIn(other.id, self.blobs())

    async def test_by_digest_it_has_no_tag(self) -> None:
        image = small("by digest")
        self.registry.push("by-digest", "1", image)
        reference = f"{self.registry.host}/by-digest@{image.manifest.digest}"
        got = await self.store.pull(reference)
        self.assertEqual((got.repo_tags, got.repo_digests), ((), (reference,)))
        tagged = await self.store.pull(f"{self.registry.host}/by-digest:1@{image.manifest.digest}")
        self.assertEqual(tagged, got)

    async def test_a_tag_that_moves_leaves_the_old_image_under_its_digest(self) -> None:
        old, new = small("old"), small("new")
        reference = self.registry.push("moves", "1", old)
        await self.store.pull(reference)
        self.registry.push("moves", "1", new)
        got = await self.store.pull(reference)
        self.assertEqual((got.id, got.repo_tags), (new.id, (reference,)))
        self.assertEqual(self.store.resolve(old.id).repo_tags, ())
        self.assertEqual(len(self.store.resolve(old.id).repo_digests), 1)

    async def test_names_of_one_image_come_together(self) -> None:
        image = small("names")
        names = [self.registry.push(name, "1", image) for name in ("names-b", "names-a")]
        for name in names:
            await self.store.pull(name)
        (got,) = self.store.list()
        self.assertEqual(got.repo_tags, tuple(sorted(names)))
        self.assertEqual(len(got.repo_digests), 2)

    async def test_layers_are_shared_and_not_fetched_again(self) -> None:
        one, two = small("share 1"), small("share 2")
        await self.store.pull(self.registry.push("share", "1", one))
        before = self.registry.log
        await self.store.pull(self.registry.push("share", "2", two))
        expected = {blob.digest for image in (one, two) for blob in image.blobs}
        self.assertEqual(self.blobs(), expected)
        self.assertEqual(len(expected), 5)
        fetched = self.registry.log[len(before) :]
        self.assertNotIn(f'"GET /v2/share/blobs/{one.layers[0].digest}', fetched)
        self.assertIn(f'"GET /v2/share/blobs/{two.layers[1].digest}', fetched)

    async def test_what_the_registry_does_not_have_is_not_found(self) -> None:
        self.registry.push("there", "1", small())
        for name in ("absent:1", "there:2", "there@sha256:" + "0" * 64):
            message = await self.fails(NotFound, self.store.pull(f"{self.registry.host}/{name}"))
            self.assertIn(name, message)
        index = oci.index([small(architecture="arm64")])
        message = await self.fails(NotFound, self.store.pull(self.registry.push("arm", "1", index)))
        self.assertIn("linux/arm64", message)
        self.assertEqual(self.store.list(), [])
        self.assert_nothing_left()

    async def test_an_image_for_another_machine_is_refused_and_leaves_nothing(self) -> None:
        reference = self.registry.push("arm-only", "1", small(architecture="arm64"))
        await self.fails(FailedPrecondition, self.store.pull(reference))
        self.assertEqual(self.blobs(), set())
        self.assert_nothing_left()

    async def test_malformed_names_never_reach_skopeo(self) -> None:
        skopeo, record = self.recording_skopeo()
        store = await self.new_store(skopeo=skopeo)
        for bad in ("", "--help", "Upper/case", "a b", "x@sha256:1", "docker://x", "x;reboot"):
            await self.fails(InvalidArgument, store.pull(bad))
            await self.fails(InvalidArgument, store.remove(bad))
            self.assertRaises(InvalidArgument, store.resolve, bad)
        self.assertEqual(record.read_text(), "")

    async def test_plain_http_only_where_the_configuration_says_so(self) -> None:
        reference = self.registry.push("http", "1", small())
        store = await self.new_store(insecure_registries=("127.0.0.1:1",))
        message = await self.fails(FailedPrecondition, store.pull(reference))
        self.assertIn("insecure_registries", message)

    async def test_a_missing_skopeo_is_said(self) -> None:
        store = await self.new_store(skopeo="/nonexistent/skopeo")
        reference = self.registry.push("x", "1", small())
        self.assertIn("images.skopeo", await self.fails(FailedPrecondition, store.pull(reference)))

    async def test_a_signature_policy_can_forbid_it(self) -> None:
        policy = Path(self.mktemp()).absolute()
        policy.write_text('{"default": [{"type": "reject"}]}')
        store = await self.new_store(policy=str(policy))
        reference = self.registry.push("policy", "1", small())
        await self.fails(PermissionDenied, store.pull(reference))
        self.assertEqual(self.blobs(), set())
        policy.write_text("{")
        message = await self.fails(FailedPrecondition, store.pull(reference))
        self.assertIn("images.policy", message)

    def mirror(self, conf: Path) -> oci.BuiltImage:
        """Write a registries.conf that maps registry.invalid/team/app:1 to this image."""
        image = small("mirror")
        self.registry.push("cache/team/app", "1", image)
        conf.parent.mkdir(parents=True)
        conf.write_text(
            '[[registry]]\nprefix = "registry.invalid"\nlocation = "registry.invalid"\n'
            f'[[registry.mirror]]\nlocation = "{self.registry.host}/cache"\ninsecure = true\n'
        )
        return image

    async def test_the_nodes_registries_conf_leads_to_a_mirror(self) -> None:
        home = Path(self.mktemp()).absolute()
        image = self.mirror(home / ".config" / "containers" / "registries.conf")
        self.patch(os, "environ", {**os.environ, "HOME": str(home)})
        got = await self.store.pull("registry.invalid/team/app:1")
        self.assertEqual((got.id, got.repo_tags), (image.id, ("registry.invalid/team/app:1",)))

    async def test_a_configured_registries_conf_is_in_the_place_of_the_nodes(self) -> None:
        conf = Path(self.mktemp()).absolute() / "registries.conf"
        image = self.mirror(conf)
        store = await self.new_store(registries_conf=str(conf))
        self.assertEqual((await store.pull("registry.invalid/team/app:1")).id, image.id)

    async def test_configured_images_are_pinned(self) -> None:
        store = await self.new_store(pinned=(f"{self.registry.host}/pin:1",))
        pinned = await store.pull(self.registry.push("pin", "1", small("pin")))
        other = await store.pull(self.registry.push("nopin", "1", small("nopin")))
        self.assertEqual((pinned.pinned, other.pinned), (True, False))

    def test_configuration_that_makes_no_sense_names_file_and_key(self) -> None:
        cases: tuple[tuple[str, Any], ...] = (
            ("insecure_registries", ["http://x"]), ("pinned", ["Bad"]), ("preload", ["Bad"]),
            ("platform", "amd64"), ("attempts", 0), ("stall_seconds", -1), ("max_parallel_pulls", 0),
        )  # fmt: skip
        for key, value in cases:
            with self.assertRaises(ConfigError) as caught:
                structure({key: value}, ImagesConfig, source="the file", prefix="images")
            self.assertIn(f"the file: images.{key}: ", str(caught.exception))


@needs_registry
class AuthTests(StoreCase):
    """A registry that requires authentication."""

    def make_registry(self) -> Registry:
        return Registry(user="reader", password="s3cret-pässword")

    async def test_right_credentials_open_it_wrong_ones_and_none_do_not(self) -> None:
        reference = self.registry.push("private", "1", small())
        await self.fails(Unauthenticated, self.store.pull(reference))
        message = await self.fails(
            Unauthenticated, self.store.pull(reference, RegistryCredentials("reader", "wr0ng"))
        )
        self.assertNotIn("wr0ng", message)
        got = await self.store.pull(reference, RegistryCredentials("reader", "s3cret-pässword"))
        self.assertEqual(got.id, small().id)
        await self.fails(Unauthenticated, self.store.pull(reference))

    async def test_base64_form(self) -> None:
        reference = self.registry.push("private", "1", small())
        auth = base64.b64encode("reader:s3cret-pässword".encode()).decode()
        await self.store.pull(reference, credentials(self.registry.host, auth=auth))

    async def test_a_configured_auth_file_serves_pulls_that_bring_none(self) -> None:
        file = Path(self.mktemp()).absolute()
        file.write_bytes(RegistryCredentials("reader", "s3cret-pässword").auth_file(self.registry.host))
        store = await self.new_store(auth_file=str(file))
        await store.pull(self.registry.push("private", "1", small()))

    async def test_the_secret_is_in_no_argument_and_in_no_file(self) -> None:
        skopeo, record = self.recording_skopeo()
        script = Path(skopeo)
        listing = Path(self.mktemp()).absolute()
        script.write_text(
            script.read_text().replace(
                "exec", f"env >>{listing}; grep -r s3cret {self.directory} >>{listing}\nexec"
            )
        )
        store = await self.new_store(skopeo=skopeo)
        secret = RegistryCredentials("reader", "s3cret-pässword")
        await store.pull(self.registry.push("private", "1", small()), secret)
        self.assertIn("copy", record.read_text())
        for text in (record.read_text(), listing.read_text(), repr(secret)):
            self.assertNotIn("s3cret", text)
            self.assertNotIn(base64.b64encode(b"reader:s3cret")[:16].decode(), text)


@needs_registry
class TlsTests(StoreCase):
    """A registry whose certificate is from a CA that the node does not trust by default."""

    def make_registry(self) -> Registry:
        return Registry(tls=True)

    async def test_an_unknown_ca_is_refused_with_advice_a_known_one_is_taken(self) -> None:
        reference = self.registry.push("tls", "1", small())
        store = await self.new_store(insecure_registries=())
        self.assertIn("certs.d", await self.fails(FailedPrecondition, store.pull(reference)))
        self.patch(os, "environ", {**os.environ, "SSL_CERT_FILE": str(self.registry.ca_file)})
        self.assertEqual((await store.pull(reference)).id, small().id)

    async def test_insecure_takes_any_certificate(self) -> None:
        self.assertEqual((await self.store.pull(self.registry.push("tls", "1", small()))).id, small().id)


@needs_registry
class DownTests(StoreCase):
    async def begin(self) -> None:
        self.store = await self.new_store(attempts=2)

    async def test_a_registry_that_is_down_is_unavailable(self) -> None:
        reference = self.registry.push("x", "1", small())
        self.registry.stop_process()
        self.assertIn(reference, await self.fails(Unavailable, self.store.pull(reference)))
        await self.fails(Unavailable, self.store.pull("registry.invalid/x"))
        self.assert_nothing_left()

    async def test_one_that_comes_back_meanwhile_serves_the_pull_after_all(self) -> None:
        reference = self.registry.push("x", "1", small())
        self.registry.stop_process()
        pull = self.run_(self.store.pull(reference))
        self.registry.start()
        self.assertEqual((await pull).id, small().id)


@needs_registry
class KeepTests(StoreCase):
    """What is kept on disk across removals and restarts."""

    async def test_a_new_store_finds_the_same_images(self) -> None:
        for i in range(3):
            await self.store.pull(self.registry.push("again", str(i), small(f"again {i}")))
        images = self.store.list()
        self.assertEqual((await self.new_store()).list(), images)

    async def test_removed_by_any_name_it_is_gone_under_all_and_its_blobs_with_it(self) -> None:
        keep, drop = small("keep"), small("drop")
        kept = await self.store.pull(self.registry.push("rm", "keep", keep))
        for name in ("rm:drop", "rm2:drop", "id", "prefix", "digest"):
            reference = self.registry.push("rm", "drop", drop)
            await self.store.pull(reference)
            await self.store.pull(self.registry.push("rm2", "drop", drop))
            named = {
                "id": drop.id,
                "prefix": drop.id[7:19],
                "digest": f"{self.registry.host}/rm@{drop.manifest.digest}",
            }.get(name, f"{self.registry.host}/{name}")
            await self.store.remove(named)
            self.assertEqual(self.store.list(), [kept])
            self.assertEqual(self.blobs(), {blob.digest for blob in keep.blobs})
            await self.store.remove(named)
        self.assertEqual((await self.new_store()).list(), [kept])

    async def test_an_unknown_id_and_an_ambiguous_beginning(self) -> None:
        self.assertRaises(NotFound, self.store.resolve, "sha256:" + "0" * 64)
        self.assertRaises(NotFound, self.store.resolve, "0" * 64)
        await self.store.remove("sha256:" + "0" * 64)
        await self.fails(NotFound, self.store.config("sha256:" + "0" * 64))
        for i in range(2):
            await self.store.pull(self.registry.push("amb", str(i), small(f"amb {i}")))
        record = next(iter(self.store._records.values()))
        twins = {f"sha256:{'abcdef' * 2}{i}{'0' * 51}": record for i in range(2)}
        self.store._records = twins
        self.assertRaises(InvalidArgument, self.store.resolve, "abcdefabcdef")
        self.assertRaises(NotFound, self.store.resolve, "abcde")

    async def test_an_image_that_lacks_a_blob_is_dropped_and_can_be_pulled_again(self) -> None:
        image = small("lacks")
        reference = self.registry.push("lacks", "1", image)
        await self.store.pull(reference)
        path = self.directory / "blobs" / "sha256" / image.layers[0].digest[7:]
        for damage in (path.unlink, lambda: path.write_bytes(b"short")):
            damage()
            store = await self.new_store()
            self.assertEqual(store.list(), [])
            self.assertEqual(self.blobs(), set())
            self.assertEqual((await store.pull(reference)).id, image.id)

    async def test_a_broken_index_is_set_aside(self) -> None:
        reference = self.registry.push("broken", "1", small())
        await self.store.pull(reference)
        for broken in ("", "{", '{"version": 99, "images": []}', '{"version": 1, "images": [{}]}'):
            (self.directory / "images.json").write_text(broken)
            store = await self.new_store()
            self.assertEqual(store.list(), [])
            self.assertTrue((self.directory / "images.broken").exists())
            await store.pull(reference)
        self.assertEqual(len(self.flushLoggedErrors()), 0)

    async def test_nobody_else_may_look_in(self) -> None:
        await self.store.pull(self.registry.push("mode", "1", small()))
        self.assertEqual(self.directory.stat().st_mode & 0o777, 0o700)

    async def test_use_of_the_disk_is_told(self) -> None:
        before = await self.store.fs_usage()
        image = oci.image([os.urandom(300_000)], compression="")
        await self.store.pull(self.registry.push("usage", "1", image))
        after = await self.store.fs_usage()
        self.assertEqual(after.path, str(self.directory))
        self.assertGreaterEqual(after.used_bytes - before.used_bytes, 300_000)
        self.assertEqual(after.inodes_used - before.inodes_used, 3)  # layer, configuration, images.json
        self.assertGreater(after.timestamp_nanos, before.timestamp_nanos)

    async def test_a_directory_that_is_a_file_is_a_clear_error(self) -> None:
        path = Path(self.mktemp()).absolute()
        path.touch()
        self.assertIn(str(path), await self.fails(ConfigError, self.new_store(path)))

    async def test_the_index_is_plain_json(self) -> None:
        await self.store.pull(self.registry.push("json", "1", small()))
        document = json.loads((self.directory / "images.json").read_text())
        self.assertEqual(document["images"][0]["manifest"]["config_digest"], small().id)
