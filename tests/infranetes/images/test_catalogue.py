# SPDX-License-Identifier: Apache-2.0
"""Images from catalogues: executables by URL, and the node's records of them."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred, fail, succeed
from twisted.trial.unittest import SynchronousTestCase, TestCase
from zope.interface import implementer
from zope.interface.verify import verifyObject

from infranetes.cri.images import ImageService
from infranetes.images.catalogue import CatalogueStore
from infranetes.images.catalogues import CatalogueSet
from infranetes.images.executables import SUM_ANNOTATION, URL_ANNOTATION, Executables, parse
from infranetes.images.interface import CatalogueImage, IImageCatalogue
from infranetes_common.errors import ConfigError, FailedPrecondition, InvalidArgument, NotFound, Unavailable
from infranetes_common.reactors import installed
from infranetes_common.wire import cri
from tests.infranetes.cri.support import NO_CALL

reactor = installed()

A, B = "a" * 64, "b" * 64


class ExecutableTests(SynchronousTestCase):
    """References of executables."""

    def test_it_provides_the_whole_interface(self) -> None:
        verifyObject(IImageCatalogue, Executables())

    def test_references_are_urls(self) -> None:
        for reference, url in (
            (f"systemd.infranetes.io/h.example/p/app@sha256:{A}", "https://h.example/p/app"),
            (f"systemd.infranetes.io/h.example__8443/app@sha256:{A}", "https://h.example:8443/app"),
            (f"https://h.example:8443/P/App%20x?v=1@sha256:{A}", "https://h.example:8443/P/App%20x?v=1"),
            (f"systemd://h.example/p@sha256:{A}", "https://h.example/p"),
        ):
            found = parse(reference, {})
            self.assertEqual((found.id, found.url), (f"sha256:{A}", url))

    def test_the_pod_may_say_more_than_a_reference_can(self) -> None:
        url = "https://h.example/Upper/Case?x=1"
        found = parse(
            "systemd.infranetes.io/h.example/app:latest", {URL_ANNOTATION: url, SUM_ANNOTATION: f"sha256:{B}"}
        )
        self.assertEqual((found.id, found.url), (f"sha256:{B}", url))
        self.assertEqual(found.digests, (f"systemd.infranetes.io/h.example/app@sha256:{B}",))
        tagged = parse("systemd.infranetes.io/h.example/app:latest", {SUM_ANNOTATION: B})
        self.assertEqual(tagged.url, "https://h.example/app")

    def test_what_is_wrong_is_said_and_where(self) -> None:
        for reference, said, words in (
            ("busybox", {}, "systemd.infranetes.io/HOST"),
            (f"http://h.example/p@sha256:{A}", {}, "not the reference"),
            ("systemd.infranetes.io/h.example/p", {}, "no checksum"),
            (f"systemd.infranetes.io/h.example@sha256:{A}", {}, "no host and path"),
            (f"systemd.infranetes.io/h.example__0/p@sha256:{A}", {}, "no host and path"),
            (f"systemd.infranetes.io/u@h.example/p@sha256:{A}", {}, "no host and path"),
            (f"systemd.infranetes.io/h/p@sha256:{A}", {SUM_ANNOTATION: B}, SUM_ANNOTATION),
            ("systemd.infranetes.io/h/p", {SUM_ANNOTATION: "x"}, SUM_ANNOTATION),
            (f"systemd.infranetes.io/h/p@sha256:{A}", {URL_ANNOTATION: "http://h/p"}, URL_ANNOTATION),
            (f"systemd.infranetes.io/h/p@sha256:{A}", {URL_ANNOTATION: "https://u:p@h/p"}, URL_ANNOTATION),
        ):
            with self.assertRaises(InvalidArgument) as caught:
                parse(reference, said)
            self.assertIn(words, str(caught.exception))
            self.assertNotIn("u:p", str(caught.exception))


@implementer(IImageCatalogue)
class Shelf:
    """A catalogue for these tests."""

    name = "shelf"
    machine_images = True

    def __init__(self) -> None:
        self.images: dict[str, CatalogueImage] = {}
        self.down = False

    def find(self, reference: str, annotations: Mapping[str, str]) -> Deferred[CatalogueImage]:
        found = self.images.get(reference)
        return fail(NotFound(reference)) if found is None else succeed(found)

    def canonical(self, reference: str) -> str:
        return reference.removeprefix("shelf.infranetes.io/")

    def present(self, found: CatalogueImage) -> Deferred[bool]:
        if self.down:
            return fail(Unavailable("the shelf is away"))
        return succeed(found in self.images.values())


class CatalogueSetTests(TestCase):
    """Catalogues beside a runtime with images of its own."""

    async def setUp(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="catalogues-", dir="/dev/shm"))
        self.addCleanup(shutil.rmtree, self.directory)
        self.shelf = Shelf()
        self.shelf.images["shelf.infranetes.io/app:1"] = CatalogueImage(
            f"sha256:{A}", ("app:1",), (f"app@sha256:{A}",), machine="m-1"
        )
        stores = []
        for catalogue in (self.shelf, Executables()):
            stores.append(CatalogueStore(reactor, self.directory / catalogue.name, catalogue))
            await stores[-1].start()
        self.images = CatalogueSet(stores)
        self.service = ImageService(self.images)

    async def pull(self, name: str) -> str:
        request = cri.PullImageRequest(image=cri.ImageSpec(image=name))
        return str((await self.service.PullImage(request, NO_CALL)).image_ref)

    async def test_a_name_is_a_catalogues_by_its_domain(self) -> None:
        for name in ("shelf.infranetes.io/app:1", f"systemd.infranetes.io/h.example/p@sha256:{B}"):
            self.assertTrue(self.images.owns(name))
        for name in ("app:1", "docker.io/library/app:1", "shelf.infranetes.io.example/app:1", "", "app"):
            self.assertFalse(self.images.owns(name))

    async def test_an_id_is_a_catalogues_once_its_image_was_pulled(self) -> None:
        ids = (f"sha256:{A}", A, A[:12], f"app@sha256:{A}")
        self.assertEqual([self.images.owns(id) for id in ids], [False] * 4)
        await self.pull("shelf.infranetes.io/app:1")
        self.assertEqual([self.images.owns(id) for id in ids], [True] * 4)
        self.assertFalse(self.images.owns(A[:5]))
        self.assertFalse(self.images.owns(B))

    async def test_each_image_is_pulled_shown_and_removed_in_its_own_catalogue(self) -> None:
        program = f"systemd.infranetes.io/h.example/p@sha256:{B}"
        self.assertEqual(await self.pull("shelf.infranetes.io/app:1"), f"sha256:{A}")
        self.assertEqual(await self.pull(program), f"sha256:{B}")
        listed = await self.service.ListImages(cri.ListImagesRequest(), NO_CALL)
        self.assertEqual([image.id for image in listed.images], [f"sha256:{A}", f"sha256:{B}"])
        for name in (f"sha256:{A}", program):
            request = cri.ImageStatusRequest(image=cri.ImageSpec(image=name), verbose=True)
            self.assertIn("info", (await self.service.ImageStatus(request, NO_CALL)).info)
            await self.service.RemoveImage(cri.RemoveImageRequest(image=request.image), NO_CALL)
        self.assertEqual(self.images.list(), [])

    async def test_what_is_of_no_catalogue_is_not_found(self) -> None:
        await self.images.remove("docker.io/library/app:1")
        status = cri.ImageStatusRequest(image=cri.ImageSpec(image="app:1"))
        self.assertFalse((await self.service.ImageStatus(status, NO_CALL)).HasField("image"))
        with self.assertRaises(NotFound):
            await self.pull("app:1")


class CatalogueStoreTests(TestCase):
    """What the node records."""

    async def setUp(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="catalogue-", dir="/dev/shm"))
        self.addCleanup(shutil.rmtree, self.directory)
        self.shelf = Shelf()
        self.shelf.images = {
            "app:1": CatalogueImage(f"sha256:{A}", ("app:1",), size=5, machine="m-1"),
            "app:2": CatalogueImage(f"sha256:{B}", ("app:2",), machine="m-2"),
        }
        self.store = await self.opened()
        self.service = ImageService(self.store)

    async def opened(self) -> CatalogueStore:
        store = CatalogueStore(reactor, self.directory, self.shelf)
        await store.start()
        return store

    async def pull(self, name: str) -> str:
        request = cri.PullImageRequest(image=cri.ImageSpec(image=name))
        return str((await self.service.PullImage(request, NO_CALL)).image_ref)

    async def listed(self) -> list[Any]:
        return list((await self.service.ListImages(cri.ListImagesRequest(), NO_CALL)).images)

    async def test_pulling_resolves_and_records_and_twice_is_once(self) -> None:
        for _ in range(2):
            self.assertEqual(await self.pull("app:1"), f"sha256:{A}")
        (image,) = await self.listed()
        self.assertEqual((image.id, list(image.repo_tags), image.size), (f"sha256:{A}", ["app:1"], 5))
        for name in ("app:1", f"sha256:{A}", "aaaaaaaa"):
            self.assertEqual(self.store.resolve(name).machine, "m-1")
        self.assertEqual((await self.opened()).list(), self.store.list())

    async def test_what_the_catalogue_has_not_is_not_found(self) -> None:
        with self.assertRaises(NotFound):
            await self.pull("app:3")
        self.assertEqual(await self.listed(), [])

    async def test_what_was_not_pulled_is_not_here(self) -> None:
        request = cri.ImageStatusRequest(image=cri.ImageSpec(image="app:1"), verbose=True)
        self.assertFalse((await self.service.ImageStatus(request, NO_CALL)).HasField("image"))
        await self.pull("app:1")
        status = await self.service.ImageStatus(request, NO_CALL)
        self.assertEqual(status.image.id, f"sha256:{A}")
        self.assertIn("m-1", status.info["info"])

    async def test_a_name_that_means_another_image_now(self) -> None:
        await self.pull("app:1")
        self.shelf.images["app:1"] = CatalogueImage(f"sha256:{B}", ("app:1",), machine="m-2")
        await self.pull("app:1")
        await self.pull("app:2")
        self.assertEqual(self.store.resolve("app:1").machine, "m-2")
        self.assertEqual([list(image.repo_tags) for image in await self.listed()], [["app:1", "app:2"], []])

    async def test_removing_forgets_it_and_twice_is_once(self) -> None:
        await self.pull("app:1")
        for _ in range(2):
            await self.service.RemoveImage(
                cri.RemoveImageRequest(image=cri.ImageSpec(image="app:1")), NO_CALL
            )
        self.assertEqual(await self.listed(), [])
        self.assertEqual((await self.opened()).list(), [])
        self.assertIn("app:1", self.shelf.images)

    async def test_names_are_known_in_all_their_spellings(self) -> None:
        await self.pull("app:1")
        self.assertEqual(self.store.resolve("shelf.infranetes.io/app:1").machine, "m-1")

    async def test_pulls_at_the_same_time_are_all_recorded(self) -> None:
        pulls = [Deferred.fromCoroutine(self.pull(name)) for name in ("app:1", "app:2", "app:1")]
        for pulling in pulls:
            await pulling
        self.assertEqual([image.machine for image in (await self.opened()).list()], ["m-1", "m-2"])

    async def test_an_image_that_is_no_longer_there_is_forgotten_when_it_is_looked_for(self) -> None:
        await self.pull("app:1")
        await self.store.check(f"sha256:{A}")
        self.assertEqual(len(await self.listed()), 1)
        self.shelf.down = True
        del self.shelf.images["app:1"]
        await self.store.check(f"sha256:{A}")
        self.assertEqual(len(await self.listed()), 1, "it can't be told")
        self.shelf.down = False
        for _ in range(2):
            await self.store.check(f"sha256:{A}")
        self.assertEqual(await self.listed(), [])
        self.assertEqual((await self.opened()).list(), [])

    async def test_nothing_of_it_can_be_loaded(self) -> None:
        await self.pull("app:1")
        with self.assertRaises(FailedPrecondition):
            async for _ in self.store.archive(f"sha256:{A}"):
                pass
        with self.assertRaises(FailedPrecondition):
            await self.store.disks(f"sha256:{A}")

    async def test_a_file_that_is_spoilt_is_said(self) -> None:
        (self.directory / "catalogue.json").write_text("{")
        with self.assertRaises(ConfigError):
            await self.opened()

    async def test_the_file_system_of_it(self) -> None:
        await self.pull("app:1")
        info = await self.service.ImageFsInfo(cri.ImageFsInfoRequest(), NO_CALL)
        self.assertEqual(info.image_filesystems[0].fs_id.mountpoint, str(self.directory))
