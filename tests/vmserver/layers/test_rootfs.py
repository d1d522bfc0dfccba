# SPDX-License-Identifier: Apache-2.0
"""Layers are stacked by the kernel's overlayfs."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path
from unittest import mock

from infranetes_common.errors import FailedPrecondition, Unavailable
from tests.support.erofs import Layer, layer
from tests.vmserver.layers.case import LayersTestCase
from vmserver.layers.rootfs import MAX_LAYERS, mount_rootfs, mount_volume
from vmserver.machine.mounts import mounts_below, unmount

LOW = layer({"a": b"low", "b": b"low", "c": b"low", "d/x": b"low"})
CLEAN = layer({".wh..wh..opq": b"", "a": b"clean"})
HIGH = layer({"a": b"high", ".wh.b": b"", "d/y": b"high"})


class OverlayCase(LayersTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.at, self.upper, self.work = (self.base / name for name in ("at", "upper", "work"))
        for directory in (self.at, self.upper, self.work):
            directory.mkdir()

    async def mounted(self, *layers: Layer) -> list[Path]:
        return [await self.put(one) for one in layers]

    def rootfs(self, layers: list[Path]) -> None:
        mount_rootfs(layers, self.upper, self.work, self.at)

    def many(self, count: int) -> list[Path]:
        """Return lower directories, named like a store's mount points."""
        made = [self.base / "l" / str(number) for number in range(count)]
        for number, directory in enumerate(made):
            directory.mkdir(parents=True)
            (directory / f"file{number}").write_text(str(number))
            (directory / "highest").write_text(str(number))
        return made


class RootfsTests(OverlayCase):
    async def test_the_highest_layer_is_seen_and_whiteouts_hide(self) -> None:
        self.rootfs(await self.mounted(LOW, HIGH))
        found = {str(path.relative_to(self.at)) for path in self.at.rglob("*") if path.is_file()}
        self.assertEqual(found, {"a", "c", "d/x", "d/y"})
        self.assertEqual((self.at / "a").read_bytes(), b"high")

    async def test_below_an_opaque_root_nothing_is_seen(self) -> None:
        layers = await self.mounted(LOW, CLEAN, layer({"e": b"top"}))
        for several in (layers, layers[:2]):
            self.rootfs(several)
            found = {str(path.relative_to(self.at)) for path in self.at.rglob("*") if path.is_file()}
            self.assertEqual(found - {"e"}, {"a"})
            self.assertEqual((self.at / "a").read_bytes(), b"clean")
            unmount(self.at)
            mount_volume(several, self.at)
            self.assertEqual(sorted({*os.listdir(self.at)} - {"e"}), ["a"])
            unmount(self.at)

    async def test_what_is_written_is_kept_above_and_stays(self) -> None:
        layers = await self.mounted(LOW, HIGH)
        self.rootfs(layers)
        (self.at / "c").write_text("written")
        (self.at / "a").unlink()
        unmount(self.at)
        self.assertEqual(list(self.at.iterdir()), [])
        self.assertEqual((layers[0] / "c").read_bytes(), b"low")
        self.rootfs(layers)
        self.assertEqual((self.at / "c").read_text(), "written")
        self.assertFalse((self.at / "a").exists())

    async def test_programs_run_with_their_set_id_bits(self) -> None:
        program = layer({"program": Path("/usr/bin/id").read_bytes(), "lib": b""})
        self.rootfs(await self.mounted(program))
        path = self.at / "program"
        path.chmod(0o4755)
        self.base.chmod(0o755)
        run = subprocess.run(
            ["setpriv", "--reuid=65534", "--clear-groups", path, "-u"], capture_output=True, text=True
        )
        self.assertEqual(run.stdout, "0\n", run.stderr)
        self.assertTrue(path.stat().st_mode & stat.S_ISUID)

    async def test_a_layer_that_comes_twice_is_mounted_once(self) -> None:
        low, high = await self.mounted(LOW, HIGH)
        self.rootfs([low, high, low])
        self.assertEqual((self.at / "a").read_bytes(), b"low")
        self.assertEqual((self.at / "b").read_bytes(), b"low")
        self.assertEqual((self.at / "d/y").read_bytes(), b"high")

    def test_an_image_without_layers_is_an_empty_directory(self) -> None:
        self.rootfs([])
        (self.at / "new").write_text("")
        self.assertTrue((self.upper / "new").exists())

    def test_200_layers_are_mounted_and_one_more_refused(self) -> None:
        layers = self.many(MAX_LAYERS + 1)
        with self.assertRaisesRegex(FailedPrecondition, "201 layers"):
            self.rootfs(layers)
        self.rootfs(layers[:-1])
        self.assertEqual((self.at / "highest").read_text(), str(MAX_LAYERS - 1))
        self.assertEqual(len(list(self.at.glob("file*"))), MAX_LAYERS)

    async def test_200_layers_of_a_store_make_a_rootfs(self) -> None:
        paths = [
            await self.put(Layer(f"sha256:{number:064x}", LOW.content)) for number in range(MAX_LAYERS - 1)
        ]
        self.rootfs([*paths, await self.put(HIGH)])
        self.assertEqual((self.at / "a").read_bytes(), b"high")
        self.assertEqual(len(mounts_below(self.base)), MAX_LAYERS + 1)

    def test_the_process_keeps_its_working_directory(self) -> None:
        before = os.getcwd()
        self.rootfs(self.many(3))
        self.assertEqual(os.getcwd(), before)

    def test_names_that_options_can_not_hold_are_refused(self) -> None:
        for name in ("a,b", "a:b", "a\\b", "a\nb"):
            with self.assertRaises(FailedPrecondition):
                mount_rootfs([self.base / "l"], self.base / name, self.work, self.at)
            with self.assertRaises(FailedPrecondition):
                self.rootfs([self.base / name])
        self.assertEqual(mounts_below(self.base), [])

    def test_a_failure_leaves_nothing(self) -> None:
        with self.assertRaises(Unavailable):
            mount_rootfs(self.many(2), self.upper, self.base / "nowhere" / "work", self.at)
        self.assertEqual(mounts_below(self.base), [])

    def test_a_mount_in_use_goes_once_it_no_longer_is(self) -> None:
        self.rootfs(self.many(2))
        with (self.at / "highest").open() as file:
            unmount(self.at)
            self.assertEqual(file.read(), "1")
        self.assertEqual(mounts_below(self.base), [])
        unmount(self.at)
        unmount(self.base / "nowhere")


class VolumeTests(OverlayCase):
    def check(self, name: str) -> None:
        with self.assertRaises(OSError):
            (self.at / "new").write_text("")
        with self.assertRaises(PermissionError):
            subprocess.run([self.at / name], check=False)
        [mounted] = [one for one in mounts_below(self.base) if one.point == str(self.at)]
        self.assertLessEqual({"ro", "nosuid", "nodev", "noexec"}, mounted.options)

    async def test_an_image_is_seen_to_be_read_only(self) -> None:
        mount_volume(await self.mounted(LOW, HIGH), self.at)
        self.assertEqual((self.at / "a").read_bytes(), b"high")
        self.assertFalse((self.at / "b").exists())
        self.check("a")

    async def test_an_image_of_one_layer_is_too(self) -> None:
        paths = await self.mounted(LOW)
        mount_volume(paths, self.at)
        self.check("a")
        self.assertNotIn("noexec", next(one for one in mounts_below(self.points)).options)

    async def test_one_that_can_not_be_made_read_only_is_not_mounted(self) -> None:
        paths = await self.mounted(LOW)
        real = mount_volume.__globals__["mount"]

        def failing(source: str, *args: object) -> None:
            if not source:
                raise FailedPrecondition("refused")
            real(source, *args)

        with mock.patch("vmserver.layers.rootfs.mount", failing), self.assertRaises(FailedPrecondition):
            mount_volume(paths, self.at)
        self.assertEqual([one.point for one in mounts_below(self.base)], [str(paths[0])])

    def test_an_image_without_layers_is_empty(self) -> None:
        mount_volume([], self.at)
        self.assertEqual(list(self.at.iterdir()), [])
        with self.assertRaises(OSError):
            (self.at / "new").write_text("")

    def test_200_layers_are_mounted_and_one_more_refused(self) -> None:
        layers = self.many(MAX_LAYERS + 1)
        with self.assertRaises(FailedPrecondition):
            mount_volume(layers, self.at)
        mount_volume(layers[1:], self.at)
        self.assertEqual((self.at / "highest").read_text(), str(MAX_LAYERS))
