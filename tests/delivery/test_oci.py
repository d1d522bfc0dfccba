# SPDX-License-Identifier: Apache-2.0
"""Images of small trees: what is in an archive, and that the same tree gives the same bytes."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import attrs
from twisted.trial.unittest import SynchronousTestCase

from delivery import elf, oci, recipe, tree
from infranetes.guest import image as guests
from infranetes.guest.container_disk import write_archive
from infranetes.installer import layout
from infranetes.installer.__main__ import parser
from infranetes.installer.node import Files
from infranetes.installer.trees import Trees
from tests.harness.needs import needs_programs

WHEN = 1_700_000_000


class LayoutCase(SynchronousTestCase):
    def setUp(self) -> None:
        self.top = Path(self.mktemp()).absolute()
        self.content = self.top / "content"
        home = self.content / "opt/infranetes/0.2.0-abc"
        (home / "usr/bin").mkdir(parents=True)
        (home / "usr/bin/python3.11").write_text("program")
        (home / "usr/bin/python3.11").chmod(0o755)
        (home / "usr/bin/python3").symlink_to("python3.11")
        (home / "data").write_text("data")

    def build(self, name: str, *others: Path) -> Path:
        layout = self.top / name
        blobs = layout / "blobs/sha256"
        blobs.mkdir(parents=True)
        layers = [oci.write_layer("a tree", each, blobs, WHEN) for each in (self.content, *others)]
        oci.write_layout(layout, layers, "0.2.0-abc", WHEN)
        archive = self.top / f"{name}.tar"
        write_archive(layout, archive)
        return archive

    def blob(self, archive: Path, digest: str) -> bytes:
        with tarfile.open(archive) as tar:
            member = tar.extractfile(f"blobs/sha256/{digest.removeprefix('sha256:')}")
            assert member is not None
            data = member.read()
        self.assertEqual(f"sha256:{hashlib.sha256(data).hexdigest()}", digest)
        return data

    def documents(self, archive: Path) -> tuple[dict[str, Any], dict[str, Any]]:  # Any: JSON
        with tarfile.open(archive) as tar:
            index = tar.extractfile("index.json")
            assert index is not None
            (named,) = json.load(index)["manifests"]
        manifest = json.loads(self.blob(archive, named["digest"]))
        return manifest, json.loads(self.blob(archive, manifest["config"]["digest"]))


class ArchiveTests(LayoutCase):
    def test_every_document_and_layer_is_what_its_digest_says(self) -> None:
        archive = self.build("one")
        manifest, config = self.documents(archive)
        (layer,) = manifest["layers"]
        data = self.blob(archive, layer["digest"])
        self.assertEqual(len(data), layer["size"])
        plain = gzip.decompress(data)
        self.assertEqual([f"sha256:{hashlib.sha256(plain).hexdigest()}"], config["rootfs"]["diff_ids"])
        with tarfile.open(fileobj=io.BytesIO(plain)) as tar:
            members = {member.name: member for member in tar.getmembers()}
        home = "opt/infranetes/0.2.0-abc"
        self.assertEqual(members[f"{home}/usr/bin/python3.11"].mode, 0o755)
        self.assertEqual(members[f"{home}/usr/bin/python3"].linkname, "python3.11")
        owners = {(each.uid, each.gid, each.uname, each.mtime) for each in members.values()}
        self.assertEqual(owners, {(0, 0, "", WHEN)})

    def test_it_runs_the_installer_by_the_trees_own_python(self) -> None:
        _, config = self.documents(self.build("one"))
        home = "/opt/infranetes/0.2.0-abc"
        self.assertEqual(
            config["config"]["Entrypoint"], [f"{home}/usr/bin/python3", "-I", "-m", "infranetes.installer"]
        )
        self.assertIn(f"INFRANETES_TREE={home}", config["config"]["Env"])

    def test_the_same_tree_gives_the_same_bytes_whenever_it_was_made(self) -> None:
        first = self.build("one").read_bytes()
        copy = self.top / "copy"
        shutil.copytree(self.content, copy, symlinks=True, copy_function=shutil.copy)
        self.content = copy
        self.assertEqual(self.build("two").read_bytes(), first)
        (copy / "opt/infranetes/0.2.0-abc/data").write_text("Data")
        self.assertNotEqual(self.build("three").read_bytes(), first)

    @needs_programs("skopeo")
    def test_skopeo_takes_it(self) -> None:
        archive = self.build("one")
        said = subprocess.run(
            ["skopeo", "inspect", f"oci-archive:{archive}"], check=True, capture_output=True, text=True
        ).stdout
        self.assertEqual(json.loads(said)["Labels"]["io.infranetes.tree"], "0.2.0-abc")


class GuestTests(LayoutCase):
    """The layer that a guest image is in."""

    def setUp(self) -> None:
        super().setUp()
        images = self.top / "guest"
        self.image = guests.GuestImage(images / "abc-17", "abc", 17.0, "bookworm", "6.1", ("vmserver_1",))
        self.image.directory.mkdir(parents=True)
        for path in (self.image.disk, self.image.kernel, self.image.initrd):
            path.write_text(path.name)
        guests.write(self.image)
        (images / guests.CURRENT).symlink_to("abc-17")
        self.images = images

    def laid_out(self) -> Path:
        layer = self.top / "layer"
        oci.guest_layer(self.images, layer)
        return layer

    def test_an_installer_finds_there_the_image_that_is_in_use(self) -> None:
        layer = self.laid_out()
        default = parser().parse_args(["run"]).guest
        node = self.top / "node"
        (node / "opt/infranetes").mkdir(parents=True)
        (node / "var/lib").mkdir(parents=True)
        installed = Trees(Files(node), Path("0.2.0-abc"), layer / str(default).lstrip("/"), set)
        installed.bring_guest_image()
        found = guests.current(node / "var/lib/infranetes/guest")
        self.assertEqual(attrs.evolve(found, directory=self.image.directory), self.image)
        self.assertEqual(found.disk.read_text(), "disk.raw")
        manifest, config = self.documents(self.build("two", layer))
        self.assertEqual((len(manifest["layers"]), len(config["rootfs"]["diff_ids"])), (2, 2))

    def test_holes_of_its_disk_are_no_part_of_what_a_node_unpacks(self) -> None:
        with self.image.disk.open("r+b") as file:
            file.truncate(64 << 20)
        (found,) = (self.laid_out() / oci.GUEST.lstrip("/")).iterdir()
        self.assertLess(sum(path.stat().st_size for path in found.iterdir()), 1 << 20)
        with gzip.open(found / "disk.raw.gz") as disk:
            self.assertEqual(disk.read(), self.image.disk.read_bytes())


class TreeTests(SynchronousTestCase):
    def test_packages_are_those_of_debian_control_and_the_programs(self) -> None:
        found = tree.packages()
        self.assertLessEqual({"python3-twisted", "skopeo", "qemu-system-x86", "nftables"}, set(found))
        self.assertEqual(set(found) & {"python3-libcloud", "infranetes-common"}, set())

    def test_what_goes_in_is_in_the_name_which_an_installer_takes(self) -> None:
        wheel = Path(self.mktemp())
        wheel.write_text("one")
        first = tree.identity({"libc6": "1"}, [wheel], "0.2.0")
        self.assertTrue(layout.is_tree(first))
        self.assertEqual(tree.identity({"libc6": "1"}, [wheel], "0.2.0"), first)
        self.assertNotEqual(tree.identity({"libc6": "2"}, [wheel], "0.2.0"), first)
        wheel.write_text("two")
        self.assertNotEqual(tree.identity({"libc6": "1"}, [wheel], "0.2.0"), first)

    def test_both_ends_mean_the_same_place(self) -> None:
        self.assertEqual(recipe.HOME, layout.HOME)

    @needs_programs("gcc", "ldd")
    def test_what_a_program_asks_of_its_loader_is_what_ldd_says(self) -> None:
        found = elf.read(Path("/usr/bin/gcc").resolve())
        assert found is not None
        said = subprocess.run(["ldd", "/usr/bin/gcc"], check=True, capture_output=True, text=True).stdout
        self.assertTrue(found.needed)
        for name in found.needed:
            self.assertIn(name, said)
        self.assertIn(found.interpreter, said)
        self.assertIsNone(elf.read(Path(__file__)))
