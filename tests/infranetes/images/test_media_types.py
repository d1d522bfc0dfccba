# SPDX-License-Identifier: Apache-2.0
"""Images whose manifest is of one kind and whose parts are of another, which skopeo does not read."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
from twisted.trial.unittest import SynchronousTestCase

from infranetes.images import RegistryCredentials
from infranetes.images.blobs import thd_credentials_in
from infranetes.images.reference import parse
from infranetes.images.skopeo import MixedMediaTypes, classify
from infranetes_common.errors import (
    FailedPrecondition,
    NotFound,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
)
from tests.harness.durations import slow
from tests.harness.needs import needs_registry
from tests.infranetes.images.hostile import begin_then_hang, send
from tests.infranetes.images.support import StoreCase, small
from tests.infranetes.images.test_failures import HostileCase
from tests.support import oci
from tests.support.registry import Registry

OCI_LAYER, DOCKER_LAYER = f"{oci.OCI}layer.v1.tar+gzip", f"{oci.DOCKER}image.rootfs.diff.tar.gzip"
OCI_CONFIG, DOCKER_CONFIG = f"{oci.OCI}config.v1+json", f"{oci.DOCKER}container.image.v1+json"


def mixed(
    layer: str = OCI_LAYER, config: str = "", flavour: str = "docker", content: str = "1"
) -> oci.BuiltImage:
    """Return an image whose manifest calls its layers, and its configuration, by another media type."""
    built = small(content, flavour=flavour)
    document = json.loads(built.manifest.data)
    for entry in document["layers"]:
        entry["mediaType"] = layer
    document["config"]["mediaType"] = config or document["config"]["mediaType"]
    manifest = oci.Blob(built.manifest.media_type, json.dumps(document).encode())
    return attrs.evolve(built, manifest=manifest)


def without_type(built: oci.BuiltImage | oci.BuiltIndex) -> oci.Blob:
    """Return a manifest or index that does not say its media type."""
    document = json.loads(built.top.data)
    del document["mediaType"]
    return oci.Blob(built.top.media_type, json.dumps(document).encode())


@needs_registry
class MixedTests(StoreCase):
    async def pulled(self, name: str, built: oci.BuiltImage | oci.BuiltIndex, image: oci.BuiltImage) -> None:
        got = await self.store.pull(self.registry.push(name, "1", built))
        self.assertEqual((got.id, got.diff_ids), (image.id, image.diff_ids))
        self.assertEqual(await self.store.config(got.id), image.config.data)
        self.assert_nothing_left()

    @slow(15, "six images are pulled")
    async def test_parts_of_an_image_may_have_media_types_of_both_kinds(self) -> None:
        for number, image in enumerate(
            (
                mixed(OCI_LAYER),
                mixed(OCI_LAYER, OCI_CONFIG, content="2"),
                mixed(DOCKER_LAYER, OCI_CONFIG, content="3"),
                mixed(DOCKER_LAYER, flavour="oci", content="4"),
                mixed(OCI_LAYER, DOCKER_CONFIG, flavour="oci", content="5"),
                mixed(DOCKER_LAYER, DOCKER_CONFIG, flavour="oci", content="6"),
            )
        ):
            await self.pulled(f"mixed-{number}", image, image)

    async def test_an_index_may_lead_to_manifests_of_the_other_kind_and_need_not_say_its_own(self) -> None:
        for flavour, other in (("oci", "docker"), ("docker", "oci")):
            image = small(other, flavour=other)
            await self.pulled(f"index-{flavour}", oci.index([image], flavour=flavour), image)
        image = mixed(content="7")
        index = oci.index([image])
        await self.pulled("index-mixed", index, image)
        await self.pulled("index-of-none", attrs.evolve(index, top=without_type(index)), image)
        plain = small("8")
        await self.pulled("of-none", attrs.evolve(plain, manifest=without_type(plain)), plain)

    async def test_layers_that_are_here_are_not_fetched_again(self) -> None:
        first, second = mixed(content="first"), mixed(content="second")
        await self.pulled("share", first, first)
        before = len(self.registry.log)
        await self.pulled("share", second, second)
        log = self.registry.log[before:]
        self.assertNotIn(f'"GET /v2/share/blobs/{first.layers[0].digest}', log)
        self.assertIn(f'"GET /v2/share/blobs/{second.layers[1].digest}', log)

    async def test_the_signature_policy_counts(self) -> None:
        policy = Path(self.mktemp()).absolute()
        policy.write_text('{"default": [{"type": "reject"}]}')
        store = await self.new_store(policy=str(policy))
        reference = self.registry.push("policy", "1", mixed())
        await self.fails(PermissionDenied, store.pull(reference))
        self.assertEqual(self.blobs(), set())

    async def test_a_mirror_has_them(self) -> None:
        conf = Path(self.mktemp()).absolute()
        conf.write_text(
            '[[registry]]\nprefix = "registry.invalid"\nlocation = "registry.invalid"\n'
            f'[[registry.mirror]]\nlocation = "{self.registry.host}/cache"\ninsecure = true\n'
        )
        image = mixed()
        self.registry.push("cache/team/app", "1", image)
        store = await self.new_store(registries_conf=str(conf))
        self.assertEqual((await store.pull("registry.invalid/team/app:1")).id, image.id)


@needs_registry
class MixedAuthTests(StoreCase):
    def make_registry(self) -> Registry:
        return Registry(user="reader", password="s3cret-pässword")

    async def test_a_registry_that_wants_a_password_gets_it(self) -> None:
        image = mixed()
        reference = self.registry.push("private", "1", image)
        await self.fails(Unauthenticated, self.store.pull(reference))
        known = RegistryCredentials("reader", "s3cret-pässword")
        self.assertEqual((await self.store.pull(reference, known)).id, image.id)
        await self.store.remove(image.id)
        file = Path(self.mktemp()).absolute()
        file.write_bytes(known.auth_file(self.registry.host))
        store = await self.new_store(auth_file=str(file))
        self.assertEqual((await store.pull(reference)).id, image.id)

    def test_credentials_of_a_file(self) -> None:
        file = Path(self.mktemp()).absolute()
        for known in (RegistryCredentials("a", "b:c"), RegistryCredentials(identity_token="t")):
            file.write_bytes(known.auth_file("h:1"))
            self.assertEqual(thd_credentials_in(str(file), "h:1"), known)
            self.assertIsNone(thd_credentials_in(str(file), "h:2"))
        for text in ("", "[]", '{"auths": {"h:1": 3}}', '{"auths": {"h:1": {"auth": "%"}}}'):
            file.write_text(text)
            self.assertIsNone(thd_credentials_in(str(file), "h:1"))
        self.assertIsNone(thd_credentials_in("/nonexistent", "h:1"))


class MixedHostileTests(HostileCase):
    """Tokens, redirections, and what a registry may do wrong."""

    def serve(self, answer: Any) -> tuple[str, oci.BuiltImage]:
        """Serve an image whose upper layer is answered so."""
        image = mixed()
        reference = self.hostile.serve("m", image)
        self.hostile.put(image.layers[1], "m", answer)
        return reference, image

    def wanting(self, token: str, data: bytes, realm: str = "") -> Any:
        """Answer with the blob who has the token, and others with where to get one."""

        def answer(request: Any) -> bytes:
            if request.getHeader("authorization") == f"Bearer {token}":
                return data
            at = realm or f"http://{self.hostile.host}/token"
            said = f'Bearer realm="{at}",service="registry",scope="repository:m:pull"'
            request.setHeader("www-authenticate", said)
            request.setResponseCode(401)
            return b""

        return answer

    async def test_a_token_is_had_from_where_the_registry_says(self) -> None:
        asked: list[Mapping[bytes, Any]] = []

        def token(request: Any) -> bytes:
            asked.append({**request.args, b"by": request.getHeader("authorization")})
            return b'{"token": "t0ken"}'

        image = mixed()
        reference = self.hostile.serve("m", image)
        self.hostile.put(image.layers[1], "m", self.wanting("t0ken", image.layers[1].data))
        self.hostile.answers["/token"] = token
        self.assertEqual((await self.store.pull(reference, RegistryCredentials("me", "secret"))).id, image.id)
        [query] = asked
        self.assertEqual(query[b"service"], [b"registry"])
        self.assertEqual(query[b"scope"], [b"repository:m:pull"])
        self.assertEqual(query[b"by"], "Basic " + b64encode(b"me:secret").decode())

    async def test_an_identity_token_is_given_for_one_and_nothing_else(self) -> None:
        image = mixed()
        reference = self.hostile.serve("m", image)
        self.hostile.put(image.layers[1], "m", self.wanting("t0ken", image.layers[1].data))
        asked: list[Any] = []

        def token(request: Any) -> bytes:
            asked.append((request.method, request.args, request.getHeader("authorization")))
            return b'{"access_token": "t0ken"}'

        self.hostile.answers["/token"] = token
        await self.store.pull(reference, RegistryCredentials(identity_token="r3fresh"))
        [(method, form, by)] = asked
        self.assertEqual((method, form[b"refresh_token"], by), (b"POST", [b"r3fresh"], None))

    @slow(15, "each answer is one more pull")
    async def test_a_token_that_is_none_or_helps_nothing(self) -> None:
        for said, kind in (
            (send(b"<html>"), Unavailable),
            (send(b'{"token": 3}'), Unavailable),
            (send(b'{"token": "a\\r\\nb"}'), Unavailable),
            (send(b'{"token": "other"}'), Unauthenticated),
            (send(b"", status=403), PermissionDenied),
        ):
            reference, _ = self.serve(self.wanting("t0ken", b""))
            self.hostile.answers["/token"] = said
            await self.fails(kind, self.store.pull(reference))
        for realm in ("ftp://x/", "file:///etc/passwd", ""):
            reference, _ = self.serve(self.wanting("t0ken", b"", realm or "x"))
            await self.fails(FailedPrecondition, self.store.pull(reference))
        self.assert_untouched()

    async def test_storage_that_it_leads_to_does_not_get_the_token(self) -> None:
        image = mixed()
        reference = self.hostile.serve("m", image)
        seen: list[Any] = []

        def storage(request: Any) -> bytes:
            seen.append(request.getHeader("authorization"))
            return image.layers[1].data

        def leading(request: Any) -> bytes:
            if request.getHeader("authorization") is None:
                return bytes(self.wanting("t0ken", b"")(request))
            request.redirect(f"http://{self.hostile.host}/storage".encode())
            return b""

        self.hostile.put(image.layers[1], "m", leading)
        self.hostile.answers.update({"/token": send(b'{"token": "t0ken"}'), "/storage": storage})
        self.assertEqual((await self.store.pull(reference)).id, image.id)
        self.assertEqual(seen, [None])

    @slow(15, "one of the answers stalls")
    async def test_wrong_bytes_and_answers_that_fail_leave_nothing(self) -> None:
        data = mixed().layers[1].data
        for answer, kind in (
            (send(data[:-1]), Unavailable),
            (send(data + b"x"), Unavailable),
            (send(bytes(len(data))), Unavailable),
            (send(b"", status=404), NotFound),
            (send(b"", status=500), Unavailable),
            (begin_then_hang(data[:9]), Unavailable),
        ):
            reference, _ = self.serve(answer)
            message = await self.fails(kind, self.store.pull(reference))
            self.assertIn(self.hostile.host, message)
            self.assert_untouched()


class WordsTests(SynchronousTestCase):
    """What a registry says is not taken for skopeo's word that the policy allows the image."""

    def test_only_skopeos_own_words_count(self) -> None:
        for text, shown in (
            ("example.org/x:1", "example.org/x:1"),
            ("docker.io/team/x:1", "team/x:1"),
            ("docker.io/library/x:1", "x:1"),
        ):
            said = 'initializing image from source docker://{}: unsupported docker v2s2 media type: "a"'
            words = said.format(shown)
            for fatal, mixed_types in ((words, True), (f"reading manifest: {words}", False)):
                escaped = fatal.replace('"', '\\"')
                error = classify(f'level=fatal msg="{escaped}"', parse(text))
                self.assertEqual(isinstance(error, MixedMediaTypes), mixed_types, fatal)
                self.assertIsInstance(error, FailedPrecondition)
