# SPDX-License-Identifier: Apache-2.0
"""The images that the suite's specs ask for, in the cluster's registry, made from Debian's packages.

Most specs use agnhost, which is Kubernetes' own (`make e2e-tools`); the other programs in its image are
Debian's, where Kubernetes' image has Alpine's. All images but busybox have the same large layer."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.cluster import images
from tests.cluster.images import Say
from tests.cluster.paths import PROGRAMS
from tests.interop import critest_images
from tests.interop.critest_images import E2E, File, layer
from tests.support import debian, oci
from tests.support.registry import Registry

PACKAGES = (
    *("bash", "bind9-dnsutils", "curl", "iperf", "iproute2", "iputils-ping"),
    *("netcat-openbsd", "nginx-light", "perl-base", "procps", "util-linux", "wget"),
)
RECIPE = "6"  # change it to have the images made again
_ENVIRONMENT = {"Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"]}
_USER = "user-defined-in-image"
#: For the busybox image. Specs have `ls -l` show a group's number, so the group must not have a name.
_GROUPS = "root:x:0:\nwww-data:x:33:\nnogroup:x:65534:\n"
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
    """Make the images in the registry whose content is in `cache`, unless they exist. Idempotent."""
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
    """Yield each image's name without the registry, its tag, and the image."""
    yield f"{E2E}/busybox", "1.37.0-1", critest_images.busybox(programs, groups=_GROUPS)
    with debian.tar(PACKAGES) as path:
        base = path.read_bytes()

    def image(config: Mapping[str, object], *more: Mapping[str, File]) -> oci.BuiltImage:
        layers = [base, *(layer(files) for files in more)]
        return oci.image(layers, {**_ENVIRONMENT, **config}, compression="zstd")

    def program(name: str, path: str) -> Mapping[str, File]:
        return {path: File((PROGRAMS / name).read_bytes(), 0o755)}

    pause = critest_images.busybox(programs, "sleep", "2147483647")
    agnhost = {**_agnhost(base), **_served("pause", "testing", pause)}
    entry: dict[str, object] = {"Entrypoint": ["/agnhost"]}
    for tag in ("2.55", "2.63.0"):
        yield f"{E2E}/agnhost", tag, image({**entry, "Cmd": ["pause"]}, agnhost)
    yield "pause", "3.10.2", image({"Entrypoint": ["/agnhost", "pause"]}, agnhost)
    yield f"{E2E}/nonroot", "1.5", image({**entry, "Cmd": ["pause"], "User": "1234"}, agnhost)
    for name in ("kitten", "nautilus"):
        data = {"data.json": File(f'{{"image": "{name}.jpg"}}'.encode()), f"{name}.jpg": File(name.encode())}
        yield f"{E2E}/{name}", "1.8", image({**entry, "Cmd": ["test-webserver"]}, agnhost, data)
    setuid = File(critest_images.compiled("nonewprivs.c", programs), 0o4755)
    yield f"{E2E}/nonewprivs", "1.4", image({"Entrypoint": ["/nnp"]}, {"nnp": setuid})
    api_server = program("sample-apiserver", "sample-apiserver")
    yield f"{E2E}/sample-apiserver", "1.29.2", image({"Entrypoint": ["/sample-apiserver"]}, api_server)
    yield "etcd", "3.6.8-0", image({"Cmd": ["etcd"]}, program("etcd", "usr/local/bin/etcd"))
    yield f"{E2E}/glibc-dns-testing", "2.0.0", image({"Cmd": ["bash"]})
    yield f"{E2E}/perl", "5.26", image({"Cmd": ["perl"]})
    # Debian's default site listens on IPv6 too, which a VM need not have.
    site = {"etc/nginx/sites-enabled/default": File(_SERVER.encode())}
    for tag in ("1.15-4", "1.27-0"):
        about = {f"usr/share/nginx/html/{tag}": File()}
        yield f"{E2E}/nginx", tag, image({"Cmd": ["nginx", "-g", "daemon off;"]}, site, about)


def _served(name: str, tag: str, image: oci.BuiltImage) -> Mapping[str, File]:
    """Return an image's files in the place from which `agnhost fake-registry-server` serves images."""
    top = f"var/registry/{name}"

    def at(kind: str, blob: oci.Blob) -> str:
        algorithm, _, digest = blob.digest.partition(":")
        return f"{top}/{kind}/{algorithm}/{digest[:2]}/{digest}/data"

    return {
        f"{top}/manifests/{tag}": File(image.top.digest.encode()),
        at("manifests", image.top): File(image.top.data),
        **{at("blobs", blob): File(blob.data) for blob in image.blobs},
    }


def _agnhost(base: bytes) -> Mapping[str, File]:
    """Return what the image has beside Debian's packages, following Kubernetes' Dockerfile."""
    files = {
        "agnhost": File((PROGRAMS / "agnhost").read_bytes(), 0o755),
        "agnhost-2": File(same="agnhost", mode=0o755),
        "coredns": File((PROGRAMS / "coredns").read_bytes(), 0o755),
        "uploads": File(mode=0o777, directory=True),
        "etc/wgetrc": File(b"tries = 1\n"),  # like busybox's wget, which Alpine has
    }
    for name in ("localhost.crt", "localhost.key"):
        files[name] = File((PROGRAMS / name).read_bytes())
    with tarfile.open(fileobj=io.BytesIO(base)) as debians:
        for name, more in _ACCOUNTS.items():
            member = debians.extractfile(f"./{name}")
            files[name] = File((member.read() if member else b"") + more.encode())
    return files
