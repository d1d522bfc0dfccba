"""Reads what registries send: indexes, manifests and configs. No I/O; nothing in them is trusted.

Sources: OCI image-spec v1.1 (manifest.md, image-index.md, config.md) and Docker's image manifest
version 2 schema 2.
"""

from __future__ import annotations

import hashlib
import json
import platform as _platform
from typing import Any

import attrs

from infranetes.images.reference import is_digest
from infranetes_common.errors import FailedPrecondition, NotFound

MAX_MANIFEST_BYTES = 4 * 1024 * 1024
MAX_CONFIG_BYTES = 4 * 1024 * 1024
MAX_LAYERS = 125  # what Docker can stack
MAX_INDEX_DEPTH = 3

_OCI = "application/vnd.oci.image."
_DOCKER = "application/vnd.docker."
_INDEXES = (_OCI + "index.v1+json", _DOCKER + "distribution.manifest.list.v2+json")
_MANIFESTS = (_OCI + "manifest.v1+json", _DOCKER + "distribution.manifest.v2+json")
_CONFIGS = (_OCI + "config.v1+json", _DOCKER + "container.image.v1+json")
_LAYERS = {
    _OCI + "layer.v1.tar": "",
    _OCI + "layer.v1.tar+gzip": "gzip",
    _OCI + "layer.v1.tar+zstd": "zstd",
    _DOCKER + "image.rootfs.diff.tar": "",
    _DOCKER + "image.rootfs.diff.tar.gzip": "gzip",
}
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64", "i686": "386", "armv7l": "arm"}


@attrs.frozen
class Layer:
    """One layer as the registry has it: `size` and `digest` are the compressed bytes'."""

    digest: str
    size: int
    compression: str  # gzip, zstd or ""


@attrs.frozen
class Manifest:
    """One platform's image; layers lowest first."""

    digest: str
    config_digest: str
    config_size: int
    layers: tuple[Layer, ...]

    @property
    def blobs(self) -> dict[str, int]:
        """Digest and size of everything that has to be fetched."""
        return {self.config_digest: self.config_size} | {layer.digest: layer.size for layer in self.layers}


@attrs.frozen
class Config:
    """What the node has to know of an image's configuration."""

    diff_ids: tuple[str, ...]
    user: str
    platform: str


def host_platform() -> str:
    """`linux/amd64` on a machine of that kind."""
    machine = _platform.machine()
    return f"linux/{_MACHINES.get(machine, machine)}"


def digest_of(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def read(data: bytes, platform: str, where: str) -> Manifest | str:
    """A manifest, or from an index the digest of the manifest for `platform`.

    :param where: the image's name, for messages.
    :raise FailedPrecondition: it is no image that can be run here.
    :raise NotFound: an index that has nothing for the platform.
    """
    document = _object(data, MAX_MANIFEST_BYTES, "manifest", where)
    media_type = document.get("mediaType")
    if document.get("schemaVersion") == 1:
        raise FailedPrecondition(
            f"image {where} is in Docker's old schema 1; push it again in a present format"
        )
    if media_type in _INDEXES or (media_type is None and "manifests" in document):
        return _choose(document, platform, where)
    if media_type not in _MANIFESTS and not (media_type is None and "layers" in document):
        raise _garbage(where, f"its manifest is of an unknown kind ({str(media_type)[:80]!r})")
    return _manifest(document, digest_of(data), where)


def read_config(data: bytes, manifest: Manifest, where: str) -> Config:
    """The configuration that belongs to `manifest`.

    :raise FailedPrecondition: the two don't fit together, or it is none.
    """
    document = _object(data, MAX_CONFIG_BYTES, "configuration", where)
    rootfs, inner = document.get("rootfs"), document.get("config") or {}
    diff_ids = rootfs.get("diff_ids") if isinstance(rootfs, dict) else None
    if not isinstance(diff_ids, list) or not all(is_digest(d) for d in diff_ids):
        raise _garbage(where, "its configuration has no list of layer digests")
    if len(diff_ids) != len(manifest.layers):
        raise _garbage(
            where, f"its configuration has {len(diff_ids)} layers, its manifest {len(manifest.layers)}"
        )
    user = inner.get("User", "") if isinstance(inner, dict) else None
    if not isinstance(user, str) or len(user) > 256:
        raise _garbage(where, "its configuration's User is no name")
    system, architecture = document.get("os") or "", document.get("architecture") or ""
    return Config(tuple(diff_ids), user, f"{system}/{architecture}")


def require_platform(config: Config, platform: str, where: str) -> None:
    """:raise FailedPrecondition: an image for other machines; one that doesn't say is taken."""
    for has, wanted in zip(config.platform.split("/"), platform.split("/"), strict=False):
        if has and has != wanted:
            raise FailedPrecondition(f"image {where} is for {config.platform}, pods here run {platform}")


def _manifest(document: dict[str, Any], digest: str, where: str) -> Manifest:
    config = _descriptor(document.get("config"), where)
    if config["mediaType"] not in _CONFIGS:
        raise FailedPrecondition(
            f"{where} is not a container image: its configuration is {config['mediaType'][:80]!r}"
        )
    if config["size"] > MAX_CONFIG_BYTES:
        raise _garbage(where, f"its configuration is over {MAX_CONFIG_BYTES} bytes")
    entries = document.get("layers")
    if not isinstance(entries, list):
        raise _garbage(where, "its manifest has no list of layers")
    if len(entries) > MAX_LAYERS:
        raise FailedPrecondition(f"image {where} has {len(entries)} layers, {MAX_LAYERS} can be stacked")
    layers = []
    for entry in entries:
        described = _descriptor(entry, where)
        if described["mediaType"] not in _LAYERS:
            raise FailedPrecondition(
                f"image {where} has a layer of the kind {described['mediaType'][:80]!r}; "
                "plain, gzip and zstd tars can be run"
            )
        compression = _LAYERS[described["mediaType"]]
        layers.append(Layer(described["digest"], described["size"], compression))
    return Manifest(digest, config["digest"], config["size"], tuple(layers))


def _choose(document: dict[str, Any], platform: str, where: str) -> str:
    entries = document.get("manifests")
    if not isinstance(entries, list):
        raise _garbage(where, "its index has no list of manifests")
    system, _, architecture = platform.partition("/")
    offered, found = [], []
    for entry in entries:
        described = _descriptor(entry, where)
        has = entry.get("platform")
        if described["mediaType"] in _INDEXES and has is None:
            found.append((2, described["digest"]))  # a nested index may have it
        if described["mediaType"] not in _MANIFESTS or not isinstance(has, dict):
            continue
        offered.append(f"{has.get('os')}/{has.get('architecture')}")
        if (has.get("os"), has.get("architecture")) == (system, architecture):
            found.append((int(has.get("variant") not in (None, "", "v1", "v7", "v8")), described["digest"]))
    if not found:
        listed = ", ".join(sorted(set(offered)))[:200] or "nothing"
        raise NotFound(f"image {where} has nothing for {platform}; it has {listed}")
    return str(min(found, key=lambda pair: pair[0])[1])


def _descriptor(entry: Any, where: str) -> dict[str, Any]:
    if not isinstance(entry, dict):
        raise _garbage(where, "a descriptor in its manifest is no object")
    size = entry.get("size")
    if not is_digest(entry.get("digest")):
        raise _garbage(where, "a digest in its manifest is not sha256: and 64 hex digits")
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size < 1 << 50:
        raise _garbage(where, "a size in its manifest is none")
    if not isinstance(entry.get("mediaType"), str):
        raise _garbage(where, "a descriptor in its manifest has no media type")
    return entry


def _object(data: bytes, limit: int, what: str, where: str) -> dict[str, Any]:
    if len(data) > limit:
        raise _garbage(where, f"its {what} is over {limit} bytes")
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise _garbage(where, f"its {what} is no JSON object")
    return document


def _garbage(where: str, why: str) -> FailedPrecondition:
    return FailedPrecondition(f"the registry's answer for image {where} can't be used: {why}")
