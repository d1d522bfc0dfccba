# SPDX-License-Identifier: Apache-2.0
"""The images of the benches, made once from Debian's packages: 1 MiB, 83 MiB and 1 GiB when pulled.

Unpacked, the two larger ones are about three times that size. They are kept below `build`; making them takes
some minutes, and the network.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

from bench.daemon import ROOT
from bench.figures import Missing, say
from tests.cluster.images import PACKAGES
from tests.interop.critest_images import PAUSE
from tests.support import debian, oci
from tests.support.registry import Registry

SIZES: Mapping[str, str] = {"1 MiB": "mib1", "83 MiB": "mib83", "1 GiB": "mib1024"}
"""The images' names in the registry."""
COMMAND, TRUE = ("sleep", "100000"), ("true",)  # all three images have both programs
_CACHE = ROOT / "build" / "bench" / "registry"
_LAYER_BYTES = 384 << 20
_MANY = (
    *("ghc", "golang-go", "llvm-dev", "clang", "default-jdk-headless", "libreoffice-core", "rustc"),
    *("libqt5webengine5", "nodejs"),
)
_LARGE = (*PACKAGES, "locales")
_RECIPE = hashlib.sha256(repr((3, _LAYER_BYTES, _LARGE, _MANY)).encode()).hexdigest()[:12]
"""Images by another recipe are in another directory."""
_ENVIRONMENT = {"Env": ["PATH=/usr/bin:/bin"]}


def make() -> None:
    """Make the images, unless they exist already. Idempotent.

    :raise Missing: they can't be made here.
    """
    made = _CACHE / _RECIPE
    _CACHE.mkdir(parents=True, exist_ok=True)
    with (_CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if made.exists():
            return
        if shutil.which("mmdebstrap") is None:
            raise Missing("the images are made with mmdebstrap: apt-get install mmdebstrap")
        say("Making images of 1 MiB, 83 MiB and 1 GiB from Debian's packages (ten minutes, once)")
        new = _CACHE / "new"
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir()
        with Registry(root=new) as registry:
            _fill(registry)
        new.rename(made)


def _fill(registry: Registry) -> None:
    registry.push(*PAUSE, oci.busybox({"Cmd": ["sleep", "2147483647"]}))
    registry.push(SIZES["1 MiB"], "1", oci.busybox())
    with debian.tar(_LARGE) as made:
        registry.push(SIZES["83 MiB"], "1", oci.image([made.read_bytes()], _ENVIRONMENT))
    with debian.tar(_MANY, "extract") as made:
        # These packages do not include the essential ones, and so lack the programs that containers run here.
        programs = {f"usr/bin/{name}": oci.BUSYBOX.read_bytes() for name in (COMMAND[0], *TRUE)}
        layers = chain(debian.layers(made, _LAYER_BYTES), [oci.layer(programs)])
        registry.push(SIZES["1 GiB"], "1", oci.image(layers, _ENVIRONMENT))


@contextmanager
def served() -> Iterator[Registry]:
    """A registry with the images, on loopback.

    :raise Missing: they have not been made.
    """
    if not (_CACHE / _RECIPE).exists():
        raise Missing("its images have not been made; see above")
    with tempfile.TemporaryDirectory(prefix="bench-registry-") as directory:
        root = Path(directory)
        (root / "data").symlink_to(_CACHE / _RECIPE / "data")
        with Registry(root=root) as registry:
            yield registry
