# SPDX-License-Identifier: Apache-2.0
"""The oci ContainerProvider with real conmon, crun and mounts, for the suites of the contract."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from infranetes_common.reactors import installed
from tests.contract.container_provider_case import ContainerProviderCase, pieces
from tests.support.crun import crun_for_here
from tests.support.oci import BuiltImage
from vmserver.containers.oci.config import OciConfig
from vmserver.containers.oci.provider import OciProvider
from vmserver.layers.arrival import BroughtLayer
from vmserver.machine.mounts import mounts_below

_file_systems: dict[str, bytes] = {}


def file_system(diff_id: str, tar: bytes) -> bytes:
    """Return a layer as erofs, made once."""
    if diff_id not in _file_systems:
        with tempfile.TemporaryDirectory() as made:
            tree, image = Path(made, "tree"), Path(made, "image")
            tree.mkdir(mode=0o755)
            with tarfile.open(fileobj=io.BytesIO(tar)) as opened:
                opened.extractall(tree, filter="tar")
            subprocess.run(["mkfs.erofs", "--quiet", "-T0", image, tree], check=True, capture_output=True)
            _file_systems[diff_id] = image.read_bytes()
    return _file_systems[diff_id]


class OciCase(ContainerProviderCase):
    """A provider with directories of the test's own."""

    crun = ""  # in place of crun for this machine

    async def setUp(self) -> None:
        self.base = Path(tempfile.mkdtemp(prefix="infranetes-oci-"))
        self.etc, self.run_dir = self.base / "etc", self.base / "run"
        self.etc.mkdir()
        self.config = OciConfig(
            crun=crun_for_here(self.base), directory=self.base / "oci", layer_dir=self.base / "layers"
        )
        self.brought: set[str] = set()
        await super().setUp()

    async def tearDown(self) -> None:
        try:
            for state in await self.provider.containers():
                await self.provider.remove(state.id)
            await self.provider.stop()  # two agents never run at the same time
            await super().tearDown()
            await self.providers[-1].layers.remove(sorted(self.brought))
            mounted = [one.point for one in mounts_below(self.base)]
            self.assertEqual(mounted, [str(self.run_dir / "oci/bin/crun")])  # for the next agent too
            self.assertEqual(os.listdir(self.config.directory / "containers"), [])
        finally:
            for line in reversed(Path("/proc/self/mounts").read_text().splitlines()):
                if str(self.base) in line:
                    subprocess.run(["umount", "-l", line.split()[1]], check=False)
            shutil.rmtree(self.base)

    def make_provider(self) -> Any:
        return OciProvider(installed(), self.config, self.etc, self.run_dir)

    async def load(self, built: BuiltImage) -> None:
        for blob, diff_id in zip(built.layers, built.diff_ids, strict=True):
            data = file_system(diff_id, gzip.decompress(blob.data))
            digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
            await self.provider.layers.put(BroughtLayer(diff_id, len(data), digest), pieces(data))
            self.brought.add(diff_id)
        await self.provider.add_image(built.id, built.config.data)
