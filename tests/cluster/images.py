# SPDX-License-Identifier: Apache-2.0
"""The content of the cluster's registry: busybox, and a Debian of 80 MiB, like images of real workloads."""

from __future__ import annotations

import contextlib
import fcntl
import shutil
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

from tests.interop import critest_images
from tests.interop.critest_images import REGISTRIES
from tests.support import debian, oci
from tests.support.registry import Registry

#: Docker Hub's names lead to the cluster's registry, so that `kubectl run --image=busybox` works.
PREFIX = "docker.io/library"
#: So do the names of the registry of Kubernetes' own end-to-end suite.
KUBERNETES_PREFIX = REGISTRIES[0]
BUSYBOX = "busybox:1"
DEBIAN = "debian:12"
PORT = 5001  # Kubernetes' suite runs a registry of its own on port 5000
#: The registry's own name on the node.
DIRECT = f"127.0.0.1:{PORT}"
PACKAGES = ("ca-certificates", "curl", "openssl", "perl", "python3", "sqlite3")
#: The names of each image; the second is for containerd, which asks a mirror of Docker Hub for the whole
#: name.
NAMES = ("{}", "library/{}")
_RECIPE = "2"  # a new recipe gets a new directory, because a cluster may be using the old one
Say = Callable[[str], None]


def content(cache: Path) -> Path:
    """Return the directory in which `make` puts the content."""
    return cache / "-".join((_RECIPE, *PACKAGES))


@contextlib.contextmanager
def locked(cache: Path) -> Iterator[Path]:
    """Hold the lock for writing to `cache`, which is made if need be; yield the content's path."""
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield content(cache)


def make(cache: Path, say: Say) -> None:
    """Make the registry's content in `cache`, unless it is there already."""
    with locked(cache) as made:
        if made.exists():
            return
        new = cache / "new"
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir()
        with Registry(root=new) as registry:
            _fill(registry, cache / "programs", say)
        new.rename(made)


def _fill(registry: Registry, programs: Path, say: Say) -> None:
    small = critest_images.busybox(programs)
    for name, tag in product(NAMES, (BUSYBOX.partition(":")[2], "latest")):
        registry.push(name.format("busybox"), tag, small)
    say("Making an image of 80 MiB from Debian's packages (a minute or two)")
    with debian.tar(PACKAGES) as made:
        large = oci.image([made.read_bytes()], {"Cmd": ["bash"], "Env": ["PATH=/usr/bin:/bin"]})
    for name, tag in product(NAMES, (DEBIAN.partition(":")[2], "latest")):
        registry.push(name.format("debian"), tag, large)


def serve(cache: Path, root: Path) -> Registry:
    """Start a registry on loopback that serves `content(cache)`. It keeps its own files in `root`."""
    root.mkdir()
    (root / "data").symlink_to(content(cache) / "data")
    return Registry(root=root, port=PORT).start()


def registries_conf() -> str:
    """Return the containers-registries.conf(5) that redirects pulls to the registry."""
    tables = (
        f'[[registry]]\nprefix = "{prefix}"\nlocation = "{DIRECT}"\ninsecure = true\n'
        for prefix in (PREFIX, KUBERNETES_PREFIX)
    )
    return "\n".join(tables)
