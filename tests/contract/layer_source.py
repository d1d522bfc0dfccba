# SPDX-License-Identifier: Apache-2.0
"""The contract of `ILayerSource`, through which a daemon's images read those of the node's runtime."""

from __future__ import annotations

import io
import tarfile

from zope.interface.verify import verifyObject

from infranetes.delegate.layer_source import ILayerSource
from infranetes.images.manifest import Layer
from infranetes_common.concurrency import start
from infranetes_common.errors import NotFound
from tests.infranetes.delegate.content_case import ImagesCase
from tests.infranetes.images.support import small
from tests.support import oci

MISSING = "sha256:" + "0" * 64


class LayerSourceContract(ImagesCase):
    """The contract for every runtime whose images VMs are made from."""

    async def test_it_offers_what_the_interface_has(self) -> None:
        source = self.source()
        verifyObject(ILayerSource, source)
        await source.start()
        self.assertEqual(await source.unusable(), "")
        self.assertEqual(await self.images.refusal(), "")

    async def test_an_image_is_what_was_pulled(self) -> None:
        built, source = small("found", config={"User": "1000:5"}), self.source()
        await source.start()
        reference = await self.pulled("found", built)
        for name in (reference, self.spelled(built.id)):
            image = await self.images.find(name)
            self.assertEqual((image.id, image.told_id), (built.id, self.spelled(built.id)))
            self.assertEqual((image.diff_ids, image.uid), (built.diff_ids, 1000))
        for _ in range(2):
            record = await source.image(built.id)
            self.assertEqual((record.id, record.diff_ids), (built.id, built.diff_ids))
            self.assertEqual(await source.config(built.id), built.config.data)
            await source.check(record, [layer.digest for layer in record.manifest.layers])
        self.assertEqual(await self.images.refusal(), "")

    async def test_its_layers_become_disks_which_a_daemon_that_starts_again_has(self) -> None:
        built = oci.image([oci.layer({"base": b"base" * 1000}), _various()], {"Cmd": ["/top"]})
        image = await self.images.find(await self.pulled("layers", built))
        self.assert_right(await self.images.disks(image.id), built.diff_ids)
        self.assertCountEqual(self.images.made, built.diff_ids)
        again = await self.started()
        self.assert_right(await again.disks(image.id), built.diff_ids)
        self.assertEqual(again.made, [])

    async def test_a_layer_is_a_file_no_longer_than_needed(self) -> None:
        built, source = small("file"), self.source()
        await source.start()
        await self.pulled("file", built)
        record = await source.image(built.id)
        for layer in record.manifest.layers:
            async with source.file(layer) as path:
                self.assertEqual(oci.digest(path.read_bytes()), layer.digest)
        self.assertEqual([*self.directory.glob("*/*")], [*self.directory.glob("disks/*")])

    async def test_of_several_platforms_this_one_is_taken(self) -> None:
        mine, other = small("mine"), small("other", architecture="s390x")
        image = await self.images.find(await self.pulled("several", oci.index([other, mine])))
        self.assertEqual((image.id, image.diff_ids), (mine.id, mine.diff_ids))

    async def test_what_is_not_there_or_not_any_more_is_not_found(self) -> None:
        built, source = small("gone"), self.source()
        await source.start()
        await self.pulled("gone", built)
        record = await source.image(built.id)
        await self.remove(self.spelled(built.id))
        for _ in range(2):
            for id in (built.id, MISSING):
                await self.assertFailure(start(source.image(id)), NotFound)
                await self.assertFailure(start(source.config(id)), NotFound)
                await self.assertFailure(start(self.images.find(self.spelled(id))), NotFound)
            for layer in (*record.manifest.layers, Layer(MISSING, 100, "")):
                with self.assertRaises(NotFound):
                    async with source.file(layer):
                        pass
            digests = [layer.digest for layer in record.manifest.layers]
            await self.assertFailure(start(source.check(record, digests)), NotFound)


def _various() -> bytes:
    """Return a layer with links, long names, whiteouts, empty files, times and owners."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path, kind, link, content in (
            ("usr", tarfile.DIRTYPE, "", b""),
            ("usr/lib", tarfile.DIRTYPE, "", b""),
            ("lib", tarfile.SYMTYPE, "usr/lib", b""),
            ("etc", tarfile.SYMTYPE, "/usr", b""),
            ("lib/through-a-link", tarfile.REGTYPE, "", b"below usr/lib"),
            ("etc/through-an-absolute-link", tarfile.REGTYPE, "", b"below usr"),
            ("usr/" + "long" * 60, tarfile.REGTYPE, "", b"x" * 5000),
            ("usr/ümläut", tarfile.REGTYPE, "", b"not in ASCII"),
            ("usr/empty", tarfile.REGTYPE, "", b""),
            ("usr/hard", tarfile.LNKTYPE, "usr/ümläut", b""),
            (".wh.base", tarfile.REGTYPE, "", b""),
        ):
            member = tarfile.TarInfo(path)
            member.type, member.linkname, member.size = kind, link, len(content)
            member.mode, member.uid, member.gid, member.mtime = 0o755, 1000, 1000, 1.5
            tar.addfile(member, io.BytesIO(content))
    return out.getvalue()
