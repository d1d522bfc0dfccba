# SPDX-License-Identifier: Apache-2.0
"""Small OCI images made from the machine's static busybox; no network needed."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import subprocess
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

BUSYBOX = Path("/bin/busybox")  # of Debian's busybox-static

OCI = "application/vnd.oci.image."
DOCKER = "application/vnd.docker."
_TYPES = {
    # (config, manifest, list, gzip layer, zstd layer, plain layer)
    "oci": (
        OCI + "config.v1+json",
        OCI + "manifest.v1+json",
        OCI + "index.v1+json",
        {"gzip": OCI + "layer.v1.tar+gzip", "zstd": OCI + "layer.v1.tar+zstd", "": OCI + "layer.v1.tar"},
    ),
    "docker": (
        DOCKER + "container.image.v1+json",
        DOCKER + "distribution.manifest.v2+json",
        DOCKER + "distribution.manifest.list.v2+json",
        {
            "gzip": DOCKER + "image.rootfs.diff.tar.gzip",
            "zstd": DOCKER + "image.rootfs.diff.tar.zstd",
            "": DOCKER + "image.rootfs.diff.tar",
        },
    ),
}


def digest(data: bytes) -> str:
    """Return the digest of `data`: `sha256:` and 64 hex digits."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


@attrs.frozen
class Blob:
    """Bytes with their media type."""

    media_type: str
    data: bytes = attrs.field(repr=False)

    @property
    def digest(self) -> str:
        return digest(self.data)

    @property
    def descriptor(self) -> dict[str, Any]:
        return {"mediaType": self.media_type, "digest": self.digest, "size": len(self.data)}


@attrs.frozen
class BuiltImage:
    """One platform's image: `id` is the digest of its config."""

    manifest: Blob
    config: Blob
    layers: tuple[Blob, ...]
    diff_ids: tuple[str, ...]

    @property
    def id(self) -> str:
        return self.config.digest

    @property
    def blobs(self) -> tuple[Blob, ...]:
        return (*self.layers, self.config)

    @property
    def manifests(self) -> tuple[Blob, ...]:
        return (self.manifest,)

    @property
    def top(self) -> Blob:
        return self.manifest


@attrs.frozen
class BuiltIndex:
    """Images of several platforms under one name."""

    top: Blob
    images: tuple[BuiltImage, ...]

    @property
    def blobs(self) -> tuple[Blob, ...]:
        return tuple(blob for image in self.images for blob in image.blobs)

    @property
    def manifests(self) -> tuple[Blob, ...]:
        return (*(image.manifest for image in self.images), self.top)


def layer(files: Mapping[str, bytes | tuple[str, str]]) -> bytes:
    """Return a layer's tar; equal files give equal bytes. A value is a file's content, ("link", target),
    ("hard", target) or ("dir", octal mode); paths are relative. Files in bin/ and usr/bin/ are executable."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for path, what in files.items():
            member = tarfile.TarInfo(path)
            member.mode = 0o755 if path.startswith(("bin/", "usr/bin/")) else 0o644
            if isinstance(what, bytes):
                member.size = len(what)
                tar.addfile(member, io.BytesIO(what))
                continue
            kind, text = what
            kinds = {"link": tarfile.SYMTYPE, "hard": tarfile.LNKTYPE, "dir": tarfile.DIRTYPE}
            member.type = kinds[kind]
            if kind != "dir":
                member.linkname = text
            else:
                member.mode = int(text, 8)
            tar.addfile(member)
    return out.getvalue()


def busybox_layer() -> bytes:
    """Return a root file system: busybox with a link per applet, and the accounts root and app (1000)."""
    listed = subprocess.run([str(BUSYBOX), "--list"], capture_output=True, text=True, check=True)
    files: dict[str, bytes | tuple[str, str]] = {
        name: ("dir", mode)
        for name, mode in (("bin", "755"), ("etc", "755"), ("root", "700"), ("tmp", "1777"), ("home", "755"))
    }
    files["bin/busybox"] = BUSYBOX.read_bytes()
    for applet in listed.stdout.split():
        if applet != "busybox":
            files[f"bin/{applet}"] = ("link", "busybox")
    files["etc/passwd"] = b"root:x:0:0:root:/root:/bin/sh\napp:x:1000:1000:app:/home:/bin/sh\n"
    files["etc/group"] = b"root:x:0:\napp:x:1000:\nextra:x:2000:app\n"
    return layer(files)


def _compress(data: bytes, compression: str) -> bytes:
    if compression == "gzip":
        return gzip.compress(data, 6, mtime=0)
    if compression == "zstd":
        return subprocess.run(["zstd", "-q", "-c"], input=data, capture_output=True, check=True).stdout
    return data


def image(
    layers: Iterable[bytes],
    config: Mapping[str, Any] | None = None,
    *,
    flavour: str = "oci",
    compression: str = "gzip",
    said: str | None = None,
    architecture: str = "amd64",
    labels: Mapping[str, str] | None = None,
) -> BuiltImage:
    """Return an image of these uncompressed layers, only one of which need be in memory at a time.

    :param config: the image config's `config` (Cmd, Env, User, ...).
    :param flavour: the media types: `oci` or `docker` (schema 2).
    :param compression: the layers' compression: `gzip`, `zstd` or "".
    :param said: what the manifest says it is; None: the truth.
    """
    config_type, manifest_type, _, layer_types = _TYPES[flavour]
    layer_type = layer_types[compression if said is None else said]
    made = [(digest(data), Blob(layer_type, _compress(data, compression))) for data in layers]
    diff_ids, blobs = tuple(diff_id for diff_id, _ in made), tuple(blob for _, blob in made)
    document = {
        "architecture": architecture,
        "os": "linux",
        "config": dict(config or {}) | ({"Labels": dict(labels)} if labels else {}),
        "rootfs": {"type": "layers", "diff_ids": list(diff_ids)},
        "history": [{"created_by": f"layer {i}"} for i in range(len(blobs))],
    }
    config_blob = Blob(config_type, json.dumps(document).encode())
    manifest = {
        "schemaVersion": 2,
        "mediaType": manifest_type,
        "config": config_blob.descriptor,
        "layers": [blob.descriptor for blob in blobs],
    }
    return BuiltImage(Blob(manifest_type, json.dumps(manifest).encode()), config_blob, blobs, diff_ids)


def disk(
    data: bytes,
    *,
    config_type: str = OCI + "empty.v1+json",
    layer_type: str = "application/x-qcow2",
    says_kind: bool = True,
) -> BuiltImage:
    """Return an artifact whose one layer is a machine's disk, with the configuration `{}`, as oras makes it.

    :param says_kind: whether its manifest has a media type."""
    config, only = Blob(config_type, b"{}"), Blob(layer_type, data)
    manifest: dict[str, Any] = {
        "schemaVersion": 2,
        **({"mediaType": OCI + "manifest.v1+json"} if says_kind else {}),
        "config": config.descriptor,
        "layers": [only.descriptor],
    }
    return BuiltImage(Blob(OCI + "manifest.v1+json", json.dumps(manifest).encode()), config, (only,), ())


def index(images: Sequence[BuiltImage], *, flavour: str = "oci") -> BuiltIndex:
    """Return an index: one name for images of several platforms."""
    entries = []
    for built in images:
        architecture = json.loads(built.config.data)["architecture"]
        platform = {"architecture": architecture, "os": "linux"}
        entries.append({**built.manifest.descriptor, "platform": platform})
    media_type = _TYPES[flavour][2]
    document = {"schemaVersion": 2, "mediaType": media_type, "manifests": entries}
    return BuiltIndex(Blob(media_type, json.dumps(document).encode()), tuple(images))


def busybox(
    config: Mapping[str, Any] | None = None,
    extra: Mapping[str, bytes | tuple[str, str]] | None = None,
    **options: Any,
) -> BuiltImage:
    """Return busybox as an image, with the files `extra` in a second layer. Its Cmd is `sh` by default."""
    layers = [busybox_layer()] + ([layer(extra)] if extra else [])
    return image(layers, {"Cmd": ["sh"], "Env": ["PATH=/bin"], **(config or {})}, **options)
