# SPDX-License-Identifier: Apache-2.0
"""The ImageService on a real store and registry, message by message."""

from __future__ import annotations

import base64
import json
import os
from functools import partial
from typing import Any

from infranetes.cri.images import ImageService
from infranetes_common.errors import InvalidArgument, NotFound, Unauthenticated, Unimplemented
from infranetes_common.wire import cri
from tests.harness.needs import needs_registry
from tests.infranetes.cri.support import NO_CALL
from tests.infranetes.images.support import StoreCase, small
from tests.support import oci
from tests.support.registry import Registry


@needs_registry
class ImageServiceTests(StoreCase):
    async def begin(self) -> None:
        await super().begin()
        self.service = ImageService(self.store)

    def make_registry(self) -> Registry:
        return Registry(user="u", password="p")

    async def pull(self, name: str, **auth: str) -> Any:
        request = cri.PullImageRequest(
            image=cri.ImageSpec(image=name),
            auth=cri.AuthConfig(**(auth or {"username": "u", "password": "p"})),
        )
        return await self.service.PullImage(request, NO_CALL)

    async def status(self, name: str, verbose: bool = False) -> Any:
        request = cri.ImageStatusRequest(image=cri.ImageSpec(image=name), verbose=verbose)
        return await self.service.ImageStatus(request, NO_CALL)

    async def list(self, name: str = "") -> list[str]:
        image_filter = cri.ImageFilter(image=cri.ImageSpec(image=name)) if name else None
        response = await self.service.ListImages(cri.ListImagesRequest(filter=image_filter), NO_CALL)
        return [image.id for image in response.images]

    async def remove(self, name: str) -> Any:
        return await self.service.RemoveImage(
            cri.RemoveImageRequest(image=cri.ImageSpec(image=name)), NO_CALL
        )

    async def test_pull_list_status_and_remove_agree(self) -> None:
        image = small(config={"User": "app:app"})
        reference = self.registry.push("a", "1", image)
        self.assertFalse((await self.status(reference)).HasField("image"))
        ref = (await self.pull(reference)).image_ref
        self.assertEqual(ref, image.id)
        for name in (
            reference,
            ref,
            ref[7:],
            ref[7:20],
            f"{self.registry.host}/a@{image.manifest.digest}",
        ):
            got = (await self.status(name)).image
            self.assertEqual((got.id, list(got.repo_tags)), (ref, [reference]))
            self.assertEqual(list(got.repo_digests), [f"{self.registry.host}/a@{image.manifest.digest}"])
            self.assertEqual((got.username, got.HasField("uid")), ("app", False))
            self.assertGreater(got.size, 0)
            self.assertEqual(await self.list(name), [ref])
        other = (await self.pull(self.registry.push("b", "1", small("other")))).image_ref
        self.assertEqual(await self.list(), [ref, other])
        self.assertEqual(await self.list("absent"), [])
        await self.remove(reference)
        await self.remove(reference)
        await self.remove(ref)
        self.assertEqual(await self.list(), [other])
        self.assertFalse((await self.status(ref)).HasField("image"))

    async def test_a_numeric_user(self) -> None:
        for i, (user, uid) in enumerate((("0", 0), ("1000:5", 1000), ("", None), ("app", None))):
            reference = self.registry.push("user", str(i), small(str(i), config={"User": user}))
            await self.pull(reference)
            got = (await self.status(reference)).image
            self.assertEqual(got.uid.value if got.HasField("uid") else None, uid)
            self.assertEqual(got.username, "app" if user == "app" else "")

    async def test_verbose_status_has_the_images_configuration(self) -> None:
        image = small()
        reference = self.registry.push("v", "1", image)
        await self.pull(reference)
        info = json.loads((await self.status(reference, True)).info["info"])
        self.assertEqual(info["imageSpec"], json.loads(image.config.data))
        self.assertEqual(dict((await self.status(reference)).info), {})
        self.assertEqual(dict((await self.status("absent", True)).info), {})

    async def test_credentials_in_all_their_forms(self) -> None:
        reference = self.registry.push("auth", "1", small())
        pair = base64.b64encode(b"u:p").decode()
        await self.pull(reference, auth=pair)
        await self.pull(reference, username="u", password="p", server_address=self.registry.host)
        await self.pull(
            reference, username="u", password="p", server_address=f"https://{self.registry.host}/v2/"
        )
        await self.fails(Unauthenticated, self.pull(reference, username="u", password="wrong"))
        await self.fails(
            Unauthenticated,
            self.pull(reference, username="u", password="p", server_address="elsewhere.example"),
        )
        await self.fails(Unimplemented, self.pull(reference, registry_token="t"))
        for bad in ("!", base64.b64encode(b"nocolon").decode(), base64.b64encode(b"\xff:\xfe").decode()):
            self.assertNotIn(bad, await self.fails(InvalidArgument, self.pull(reference, auth=bad)))
        await self.fails(InvalidArgument, self.pull(reference, username="a:b", password="p"))

    async def test_bad_names_are_refused_by_every_call(self) -> None:
        for bad in ("", "UPPER", "a b", "x@sha256:1", "http://x/y"):
            await self.fails(InvalidArgument, self.pull(bad))
            await self.fails(InvalidArgument, self.status(bad))
            await self.fails(InvalidArgument, self.remove(bad))
            if bad:
                await self.fails(InvalidArgument, self.list(bad))
        await self.fails(NotFound, self.pull(f"{self.registry.host}/absent:1"))

    async def test_kept_states_are_a_part_of_the_file_system(self) -> None:
        used = []
        for kept in (0, 12345):
            service = ImageService(self.store, partial(int, kept))
            response = await service.ImageFsInfo(cri.ImageFsInfoRequest(), NO_CALL)
            used.append(response.image_filesystems[0].used_bytes.value)
        self.assertEqual(used[1] - used[0], 12345)

    async def test_the_file_system(self) -> None:
        image = oci.image([oci.layer({"large": os.urandom(200_000)})])
        pulled = (await self.pull(self.registry.push("fs", "1", image))).image_ref
        response = await self.service.ImageFsInfo(cri.ImageFsInfoRequest(), NO_CALL)
        (usage,) = response.image_filesystems
        self.assertEqual(usage.fs_id.mountpoint, str(self.directory))
        self.assertGreater(usage.used_bytes.value, 0)
        self.assertGreater(usage.inodes_used.value, 3)
        self.assertGreater(usage.timestamp, 10**18)
        self.assertEqual(list(response.container_filesystems), [usage])  # kubelet does not check for it
        [disk] = await self.store.disks(pulled)
        response = await self.service.ImageFsInfo(cri.ImageFsInfoRequest(), NO_CALL)
        more = response.image_filesystems[0].used_bytes.value - usage.used_bytes.value
        self.assertGreaterEqual(more, disk.size)
        await self.remove(pulled)  # as kubelet does to make room
        response = await self.service.ImageFsInfo(cri.ImageFsInfoRequest(), NO_CALL)
        left = response.image_filesystems[0].used_bytes.value
        self.assertLess(left, usage.used_bytes.value - len(image.layers[0].data))
