# SPDX-License-Identifier: Apache-2.0
"""What the tests of EROFS images share: tars, and their images, made in this process and mounted."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import stat
import subprocess
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from infranetes.images.erofs.convert import convert
from infranetes.images.erofs.limits import Limits

Member = tuple[tarfile.TarInfo, bytes]


def member(path: str, kind: bytes = tarfile.REGTYPE, content: bytes = b"", **fields: object) -> Member:
    """Return one entry of a tar. `xattrs` is a mapping of names; other fields are TarInfo's."""
    info = tarfile.TarInfo(path)
    info.type, info.size = kind, len(content)
    info.mode = 0o755 if kind == tarfile.DIRTYPE else 0o644
    xattrs = fields.pop("xattrs", {})
    assert isinstance(xattrs, Mapping)
    info.pax_headers = {
        f"SCHILY.xattr.{name}": value.decode("utf-8", "surrogateescape") for name, value in xattrs.items()
    }
    for name, value in fields.items():
        setattr(info, name, value)
    return info, content


def tar(members: Iterable[Member], form: int = tarfile.PAX_FORMAT) -> bytes:
    """Return a tar of these entries, in this order."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form, errors="surrogateescape") as archive:
        for info, content in members:
            archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


def digest(data: bytes) -> str:
    """Return `sha256:` and 64 hex digits."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def converted(
    data: bytes, target: Path, limits: Limits | None = None, below: Sequence[Path] | None = ()
) -> bytes:
    """Make the image of a tar in this process, without the child. Return its bytes.

    :param below: the images of the layers below, lowest first; None: they are not known."""
    with contextlib.ExitStack() as stack:
        layer, image = stack.enter_context(tempfile.TemporaryFile()), stack.enter_context(open(target, "wb"))
        layer.write(data)
        layer.seek(0)
        lower = None
        if below is not None:
            lower = [stack.enter_context(open(image_below, "rb")).fileno() for image_below in below]
        convert(layer.fileno(), image.fileno(), "", digest(data), limits or Limits(), lower)
    return target.read_bytes()


def check(image: Path) -> None:
    """Check an image with fsck.erofs."""
    done = subprocess.run(["fsck.erofs", "--extract", str(image)], capture_output=True, text=True)
    if done.returncode or "error" in (done.stdout + done.stderr).lower():
        raise AssertionError(f"fsck.erofs: {done.returncode} {done.stdout}{done.stderr}")


@contextlib.contextmanager
def mounted(image: Path) -> Iterator[Path]:
    """Mount an image, on a loop device that disappears with the mount."""
    with tempfile.TemporaryDirectory(prefix="erofs-") as at:
        subprocess.run(["mount", "-t", "erofs", "-o", "loop,ro", str(image), at], check=True)
        try:
            yield Path(at)
        finally:
            subprocess.run(["umount", at], check=True)


@contextlib.contextmanager
def overlaid(images: Iterable[Path]) -> Iterator[Path]:
    """Mount images as an overlay, the lowest first, with a writable layer on top."""
    with contextlib.ExitStack() as stack:
        lower = [str(stack.enter_context(mounted(image))) for image in images]
        top = stack.enter_context(tempfile.TemporaryDirectory(prefix="overlay-"))
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", top], check=True)
        stack.callback(subprocess.run, ["umount", top], check=True)
        for name in ("upper", "work", "merged"):
            os.mkdir(f"{top}/{name}")
        options = f"lowerdir={':'.join(lower[::-1])},upperdir={top}/upper,workdir={top}/work"
        subprocess.run(["mount", "-t", "overlay", "-o", options, "overlay", f"{top}/merged"], check=True)
        stack.callback(subprocess.run, ["umount", f"{top}/merged"], check=True)
        yield Path(top, "merged")


def shown(path: Path) -> dict[str, object]:
    """Return what can be seen of a file, except its inode's number."""
    status = path.lstat()
    found: dict[str, object] = {
        "mode": oct(status.st_mode),
        "owner": (status.st_uid, status.st_gid),
        "mtime": status.st_mtime_ns,
        "links": status.st_nlink,
        "xattrs": {n: os.getxattr(path, n, follow_symlinks=False) for n in _xattrs(path)},
    }
    if stat.S_ISREG(status.st_mode):
        found["content"] = path.read_bytes()
    elif stat.S_ISLNK(status.st_mode):
        found["content"] = os.readlink(path)
    elif stat.S_ISDIR(status.st_mode):
        found["content"] = sorted(os.listdir(path))
    else:
        found["device"] = (os.major(status.st_rdev), os.minor(status.st_rdev))
    return found


def _xattrs(path: Path) -> list[str]:
    return sorted(os.listxattr(path, follow_symlinks=False))
