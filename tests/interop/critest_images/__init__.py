# SPDX-License-Identifier: Apache-2.0
"""Small images, made from Debian's packages, for every name that critest asks a registry for.

They are stand-ins: what a spec does with its image works in them as in Kubernetes' own. An image that is
asked for by a digest of Kubernetes' can't have one."""

from __future__ import annotations

import io
import os
import re
import subprocess
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import attrs

from tests.support import oci

HERE = Path(__file__).parent
E2E, STAGING = "e2e-test-images", "k8s-staging-cri-tools"
#: The registries in critest's names; all of them are the one at hand.
REGISTRIES = ("registry.k8s.io", "k8s.gcr.io", "gcr.io")
#: The image of most containers, whose layer all others begin with.
BASE = f"{REGISTRIES[0]}/{E2E}/busybox:1.29-2"
#: What containerd keeps a pod's namespaces with. Not one of those that specs remove.
PAUSE = ("pause", "sandbox")

_LIBRARY = re.compile(r"(/\S+) \(0x")
_ENVIRONMENT = {"Env": ["PATH=/usr/sbin:/bin"]}
_PASSWD = """\
root:x:0:0:root:/root:/bin/sh
www-data:x:33:33:www-data:/var/www:/bin/false
default-user:x:1000:1000::/home:/bin/sh
nobody:x:65534:65534:nobody:/home:/bin/false
"""
_GROUPS = "root:x:0:\nwww-data:x:33:\ndefault-user:x:1000:\nnogroup:x:65534:\n"
# busybox has none in Debian.
_PGREP = """\
#!/bin/sh
found=1
for each in /proc/[0-9]*; do
    if [ "$(cat "$each/comm" 2>/dev/null)" = "$1" ]; then echo "${each#/proc/}"; found=0; fi
done
exit $found
"""


@attrs.frozen
class File:
    """A member of a layer. `same`: the path of another member whose hard link it is."""

    content: bytes = attrs.field(default=b"", repr=False)
    mode: int = 0o644
    same: str = ""
    directory: bool = False


def layer(files: Mapping[str, File]) -> bytes:
    """A tar, the same bytes for the same files."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for path, file in files.items():
            member = tarfile.TarInfo(path)
            member.mode = file.mode
            if file.directory:
                member.type = tarfile.DIRTYPE
                tar.addfile(member)
            elif file.same:
                member.type, member.linkname = tarfile.LNKTYPE, file.same
                tar.addfile(member)
            else:
                member.size = len(file.content)
                tar.addfile(member, io.BytesIO(file.content))
    return out.getvalue()


def _directory(mode: int = 0o755) -> File:
    return File(mode=mode, directory=True)


def fetch(cache: Path) -> Path:
    """Have what `images` needs of the network: the program of Debian's package busybox. It installs beside
    no busybox-static, whose shell runs its own `ls` whatever became of /bin/ls."""
    program = cache / "busybox" / "bin" / "busybox"
    if not program.exists():
        cache.mkdir(parents=True, exist_ok=True)
        get = ["apt-get", "-q", "-o", "APT::Sandbox::User=root", "download", "busybox"]
        if subprocess.run(get, cwd=cache, capture_output=True).returncode:
            subprocess.run(["apt-get", "-qq", "update"], check=True)
            subprocess.run(get, cwd=cache, check=True, capture_output=True)
        package = max(cache.glob("busybox_*.deb"))
        subprocess.run(["dpkg", "-x", str(package), str(cache / "busybox")], check=True)
    return program


def _libraries(program: Path) -> list[Path]:
    done = subprocess.run(["ldd", str(program)], capture_output=True, text=True, check=True)
    return [Path(path) for path in _LIBRARY.findall(done.stdout)]


def _base(cache: Path) -> dict[str, File]:
    """A root file system: busybox, each of its commands a file of its own, and `ipcs`."""
    busybox, ipcs = fetch(cache), Path("/usr/bin/ipcs")
    files = {
        name: _directory(mode)
        for name, mode in (
            ("bin", 0o755),
            ("etc", 0o755),
            ("home", 0o755),
            ("root", 0o700),
            ("tmp", 0o1777),
            ("var", 0o755),
            ("var/run", 0o755),
            ("var/www", 0o755),
        )
    }
    files["bin/busybox"] = File(busybox.read_bytes(), 0o755)
    listed = subprocess.run([str(busybox), "--list"], capture_output=True, text=True, check=True)
    for applet in listed.stdout.split():
        if applet != "busybox":
            files[f"bin/{applet}"] = File(same="bin/busybox", mode=0o755)
    files["bin/ipcs"] = File(ipcs.read_bytes(), 0o755)
    files["bin/pgrep"] = File(_PGREP.encode(), 0o755)
    for library in sorted({*_libraries(busybox), *_libraries(ipcs)}):
        for parent in reversed(library.parents[:-1]):
            files.setdefault(str(parent).lstrip("/"), _directory())
        files[str(library).lstrip("/")] = File(library.read_bytes(), 0o755)
    files["etc/passwd"] = File(_PASSWD.encode())
    files["etc/group"] = File(_GROUPS.encode())
    return files


def busybox(cache: Path, *command: str, groups: str = _GROUPS) -> oci.BuiltImage:
    """The first of `images`, by itself: unlike the static one it finds hosts by their names.

    :param command: what it runs; none: a shell. :param groups: its `/etc/group`."""
    cache.mkdir(parents=True, exist_ok=True)
    files = {**_base(cache), "etc/group": File(groups.encode())}
    return oci.image([layer(files)], {"Cmd": [*(command or ["sh"])], **_ENVIRONMENT})


def compiled(source: str, cache: Path) -> bytes:
    """A static program from the C beside this."""
    program = cache / source.removesuffix(".c")
    text = HERE / source
    if not program.exists() or program.stat().st_mtime < text.stat().st_mtime:
        options = ("-O2", "-Wall", "-Wextra", "-Werror", "-static", "-s")
        subprocess.run(["gcc", *options, "-o", str(program), str(text)], check=True)
    return program.read_bytes()


def images(cache: Path) -> Iterator[tuple[str, str, oci.BuiltImage]]:
    """Name without its registry, tag and image of all that critest pulls.

    :param cache: a directory for what is fetched and compiled; made if need be."""
    cache.mkdir(parents=True, exist_ok=True)
    base = layer(_base(cache))

    def image(config: Mapping[str, object] | None = None, *more: bytes) -> oci.BuiltImage:
        return oci.image([base, *more], {"Cmd": ["sh"], **_ENVIRONMENT, **(config or {})})

    def marked(mark: str) -> oci.BuiltImage:
        return image(None, layer({"mark": File(mark.encode())}))

    server = File(compiled("server.c", cache), 0o755)
    parents = {name: _directory() for name in ("usr", "usr/sbin", "usr/local", "usr/local/bin")}
    nginx = layer({**parents, "usr/sbin/nginx": server})
    httpd = layer({**parents, "usr/local/bin/httpd": server})
    setuid = File(compiled("nonewprivs.c", cache), 0o4755)
    yield f"{E2E}/busybox", "1.29-2", image()
    yield f"{E2E}/nginx", "1.14-2", image({"Cmd": ["/usr/sbin/nginx"]}, nginx)
    yield f"{E2E}/httpd", "2.4.39-4", image({"Cmd": ["/usr/local/bin/httpd"]}, httpd)
    yield f"{E2E}/nonewprivs", "1.3", image({"Cmd": ["/nnp"]}, layer({"nnp": setuid}))
    hostnet = f"{STAGING}/hostnet-nginx-{_GO_NAMES.get(os.uname().machine, os.uname().machine)}"
    yield hostnet, "latest", image({"Cmd": ["/usr/sbin/nginx", "12003"]}, nginx)
    for name, user in (
        ("uid", "1002"),
        ("username", "www-data"),
        ("uid-group", "1003:1004"),
        ("username-group", "www-data:1004"),
    ):
        yield f"{STAGING}/test-image-user-{name}", "latest", image({"User": user})
    groups = layer({"etc/group": File(f"{_GROUPS}group-defined-in-image:x:50000:default-user\n".encode())})
    yield f"{STAGING}/test-image-predefined-group", "latest", image({"User": "1000"}, groups)
    for name in ("latest", "1", "2", "3"):
        yield f"{STAGING}/test-image-{name}", "latest", marked(name)
    for tag in ("test", "all"):
        yield f"{STAGING}/test-image-tag", tag, marked(f"tag {tag}")
    same = marked("tags")
    for tag in ("1", "2", "3"):
        yield f"{STAGING}/test-image-tags", tag, same
    forever = {"Cmd": ["sleep", "2147483647"]}
    yield "pause", "3.9", image(forever, layer({"mark": File(b"pause")}))
    yield *PAUSE, image(forever)


_GO_NAMES = {"x86_64": "amd64", "aarch64": "arm64"}
