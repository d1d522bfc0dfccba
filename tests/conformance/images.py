# SPDX-License-Identifier: Apache-2.0
"""The images that the suite's specs ask for, in the cluster's registry, made from Debian's packages.

agnhost, the program of most, is Kubernetes' own (`make e2e-tools`); what it finds beside it is Debian's where
Kubernetes' image has Alpine's. All but busybox have the same large layer."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.cluster import images
from tests.cluster.components import PROGRAMS
from tests.cluster.images import Say
from tests.interop import critest_images
from tests.interop.critest_images import E2E, File, layer
from tests.support import debian, oci
from tests.support.registry import Registry

PACKAGES = (
    *("bash", "bind9-dnsutils", "curl", "iperf", "iproute2", "iputils-ping"),
    *("netcat-openbsd", "nginx-light", "perl-base", "procps", "util-linux", "wget"),
)
RECIPE = "4"  # another one, and they are made again
_ENVIRONMENT = {"Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"]}
_USER = "user-defined-in-image"
# With -p a shell keeps the user that it is by its mode.
_SETUID_CONFIG: Mapping[str, object] = {
    "Entrypoint": ["/usr/local/bin/nnp", "-p", "-c", 'echo "Effective uid: $EUID"']
}
_SERVER = """\
server {
    listen 80 default_server;
    root /usr/share/nginx/html;
    index index.html;
}
"""
_ACCOUNTS = {
    "etc/passwd": f"{_USER}:x:1000:1000::/home:/bin/sh\n",
    "etc/group": f"{_USER}:x:1000:\ngroup-defined-in-image:x:50000:{_USER}\n",
}


def make(cache: Path, say: Say) -> None:
    """Have them in the registry whose content is in `cache`; quick when they are there."""
    images.make(cache, say)
    with images.locked(cache) as content:
        stamp = content / f"suite-{RECIPE}"
        if stamp.exists():
            return
        say("Making the images of Kubernetes' end-to-end suite (a minute or two)")
        with Registry(root=content) as registry:
            for name, tag, image in _images(cache / "programs"):
                registry.push(name, tag, image)
        stamp.touch()


def _images(programs: Path) -> Iterator[tuple[str, str, oci.BuiltImage]]:
    """Name without its registry, tag and image."""
    yield f"{E2E}/busybox", "1.37.0-1", critest_images.busybox(programs)
    with debian.tar(PACKAGES) as path:
        base = path.read_bytes()

    def image(config: Mapping[str, object], *more: Mapping[str, File]) -> oci.BuiltImage:
        layers = [base, *(layer(files) for files in more)]
        return oci.image(layers, {**_ENVIRONMENT, **config}, compression="zstd")

    agnhost = _agnhost(base)
    entry: dict[str, object] = {"Entrypoint": ["/agnhost"]}
    for tag in ("2.55", "2.63.0"):
        yield f"{E2E}/agnhost", tag, image({**entry, "Cmd": ["pause"]}, agnhost)
    yield "pause", "3.10.2", image({"Entrypoint": ["/agnhost", "pause"]}, agnhost)
    yield f"{E2E}/nonroot", "1.5", image({**entry, "Cmd": ["pause"], "User": "1234"}, agnhost)
    for name in ("kitten", "nautilus"):
        data = {"data.json": File(f'{{"image": "{name}.jpg"}}'.encode()), f"{name}.jpg": File(name.encode())}
        yield f"{E2E}/{name}", "1.8", image({**entry, "Cmd": ["test-webserver"]}, agnhost, data)
    yield f"{E2E}/nonewprivs", "1.4", image(_SETUID_CONFIG, _setuid(base))
    yield f"{E2E}/glibc-dns-testing", "2.0.0", image({"Cmd": ["bash"]})
    yield f"{E2E}/perl", "5.26", image({"Cmd": ["perl"]})
    # The default site of Debian's listens on IPv6 too, which a VM need not have.
    site = {"etc/nginx/sites-enabled/default": File(_SERVER.encode())}
    for tag in ("1.15-4", "1.27-0"):
        about = {f"usr/share/nginx/html/{tag}": File()}
        yield f"{E2E}/nginx", tag, image({"Cmd": ["nginx", "-g", "daemon off;"]}, site, about)


def _setuid(base: bytes) -> Mapping[str, File]:
    """A shell that is root's whoever runs it, unless the kernel is told to grant no more privileges."""
    with tarfile.open(fileobj=io.BytesIO(base)) as debians:
        shell = debians.extractfile("./usr/bin/bash")
        assert shell is not None
        return {"usr/local/bin/nnp": File(shell.read(), 0o4755)}


def _agnhost(base: bytes) -> Mapping[str, File]:
    """What the image has beyond Debian, as Kubernetes' Dockerfile has it."""
    files = {
        "agnhost": File((PROGRAMS / "agnhost").read_bytes(), 0o755),
        "agnhost-2": File(same="agnhost", mode=0o755),
        "coredns": File((PROGRAMS / "coredns").read_bytes(), 0o755),
        "uploads": File(mode=0o777, directory=True),
        "etc/wgetrc": File(b"tries = 1\n"),  # busybox's, which Alpine has, tries once
    }
    for name in ("localhost.crt", "localhost.key"):
        files[name] = File((PROGRAMS / name).read_bytes())
    with tarfile.open(fileobj=io.BytesIO(base)) as debians:
        for name, more in _ACCOUNTS.items():
            member = debians.extractfile(f"./{name}")
            files[name] = File((member.read() if member else b"") + more.encode())
    return files
