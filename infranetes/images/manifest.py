# SPDX-License-Identifier: Apache-2.0
"""Parsing what registries send: indexes, manifests and configurations. Nothing in them is trusted.

Sources: OCI image-spec v1.1 (manifest.md, image-index.md, config.md) and Docker's image manifest
version 2 schema 2.
"""

from __future__ import annotations

import hashlib
import platform as _platform
from collections.abc import Mapping

import attrs

from infranetes.images.reference import is_digest
from infranetes_common import bounded_json
from infranetes_common.errors import FailedPrecondition, NotFound

MAX_MANIFEST_BYTES = 4 * 1024 * 1024
MAX_CONFIG_BYTES = 4 * 1024 * 1024
MAX_LAYERS = 200
"""The largest number of layers that an image may have, which is also what a VM's agent can stack."""
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
    _OCI + "layer.nondistributable.v1.tar": "",
    _OCI + "layer.nondistributable.v1.tar+gzip": "gzip",
    _OCI + "layer.nondistributable.v1.tar+zstd": "zstd",
    _DOCKER + "image.rootfs.diff.tar": "",
    _DOCKER + "image.rootfs.diff.tar.gzip": "gzip",
    _DOCKER + "image.rootfs.diff.tar.zstd": "zstd",
    _DOCKER + "image.rootfs.foreign.diff.tar.gzip": "gzip",
}
# As kernels call them, and some builders, and as images are to say it.
_ARCHITECTURES = {
    **{"x86_64": "amd64", "x86-64": "amd64", "aarch64": "arm64"},
    **{"i386": "386", "i686": "386", "armhf": "arm", "armel": "arm", "armv7l": "arm"},
}


@attrs.frozen
class Layer:
    """One layer as the registry has it; digest and size are those of the compressed bytes.

    :ivar compression: gzip, zstd or "". A manifest may say another one than that of the bytes.
    """

    digest: str
    size: int
    compression: str


@attrs.frozen
class Manifest:
    """The image for one platform; the lowest layer comes first.

    :ivar disk: it is no container image, but an artifact whose one layer is the file of a machine's disk.
    """

    digest: str
    config_digest: str
    config_size: int
    layers: tuple[Layer, ...]
    disk: bool = False

    @property
    def blobs(self) -> dict[str, int]:
        """Sizes of everything that has to be fetched, by digest."""
        return {self.config_digest: self.config_size} | {layer.digest: layer.size for layer in self.layers}


@attrs.frozen
class Config:
    """The parts of an image's configuration that the node needs."""

    diff_ids: tuple[str, ...]
    user: str
    platform: str


@attrs.frozen
class _Descriptor:
    """A checked descriptor of an index or a manifest."""

    media_type: str
    digest: str
    size: int


def host_platform() -> str:
    """Return this machine's platform, such as linux/amd64."""
    return _platform_of("linux", _platform.machine())


def _platform_of(system: object, architecture: object) -> str:
    """Return a platform as OS/ARCHITECTURE, in the spelling of images; "" stands for what is not said."""
    lowered = str(architecture or "").lower()
    return f"{str(system or '').lower()}/{_ARCHITECTURES.get(lowered, lowered)}"


def digest_of(data: bytes) -> str:
    """Return the digest of some bytes: sha256: and 64 hex digits."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def read(data: bytes, platform: str, where: str, *, disks: bool = False) -> Manifest | str:
    """Parse a manifest; of an index, return the digest of the manifest for `platform`.

    :param where: the image's name, for messages. :param disks: take artifacts that may be machines' disks.
    :raise FailedPrecondition: it is not an image that can be run here.
    :raise NotFound: the index has nothing for the platform.
    """
    document = _object(data, MAX_MANIFEST_BYTES, "manifest", where)
    media_type = document.get("mediaType")
    if document.get("schemaVersion") == 1:
        raise FailedPrecondition(
            f"image {where} is in Docker's old schema 1; push it again in a current format"
        )
    if media_type in _INDEXES or (media_type is None and "manifests" in document):
        return _choose(document, platform, where)
    if media_type not in _MANIFESTS and not (media_type is None and "layers" in document):
        raise _garbage(where, f"its manifest is of an unknown kind ({str(media_type)[:80]!r})")
    return _manifest(document, digest_of(data), where, disks)


def outline(data: bytes, where: str) -> tuple[str, tuple[str, ...]]:
    """Return the digest of the configuration that a manifest names, and the digests that an index lists.

    One of both is empty. Nothing else is checked: `read` does that.

    :raise FailedPrecondition: it is neither.
    """
    document = _object(data, MAX_MANIFEST_BYTES, "manifest", where)
    entries = document.get("manifests")
    if isinstance(entries, list):
        return "", tuple(_descriptor(entry, where).digest for entry in entries)
    return _descriptor(document.get("config"), where).digest, ()


def read_config(data: bytes, manifest: Manifest, where: str) -> Config:
    """Parse the configuration that belongs to `manifest`.

    :raise FailedPrecondition: it is invalid, or does not match the manifest.
    """
    document = _object(data, MAX_CONFIG_BYTES, "configuration", where)
    rootfs, inner = document.get("rootfs"), document.get("config") or {}
    diff_ids = rootfs.get("diff_ids") if isinstance(rootfs, dict) else None
    if diff_ids is None and not manifest.layers:
        diff_ids = []
    if not isinstance(diff_ids, list) or not all(is_digest(d) for d in diff_ids):
        raise _garbage(where, "its configuration has no list of layer digests")
    if len(diff_ids) != len(manifest.layers):
        raise _garbage(
            where, f"its configuration has {len(diff_ids)} layers, its manifest {len(manifest.layers)}"
        )
    user = inner.get("User") if isinstance(inner, dict) else inner
    user = "" if user is None else user
    if not isinstance(user, str) or len(user) > 256:
        raise _garbage(where, "its configuration's User is no name")
    return Config(tuple(diff_ids), user, _platform_of(document.get("os"), document.get("architecture")))


def is_object(data: bytes) -> bool:
    """Whether some bytes are a JSON object that takes no more memory than is due."""
    return _parsed(data) is not None


def read_disk_config(data: bytes) -> Config:
    """Parse the configuration of an artifact that is a disk, which may be anything, also an image's.

    Of its platform only the machine counts: Windows' disks are booted as Linux's are."""
    document = _parsed(data) or {}
    return Config((), "", _platform_of("", document.get("architecture")))


def _parsed(data: bytes) -> dict[str, object] | None:
    try:
        document = bounded_json.loads(data)
    except ValueError:
        return None
    return document if isinstance(document, dict) else None


def require_platform(config: Config, platform: str, where: str) -> None:
    """Refuse an image for another platform; one that names none is accepted.

    :raise FailedPrecondition: it is for another platform.
    """
    for has, needed in zip(config.platform.split("/"), platform.split("/"), strict=False):
        if has and has != needed:
            raise FailedPrecondition(f"image {where} is for {config.platform}, pods here run {platform}")


def _manifest(document: Mapping[str, object], digest: str, where: str, disks: bool) -> Manifest:
    config = _descriptor(document.get("config"), where)
    entries = document.get("layers")
    entries = [] if entries is None else entries
    if disks and isinstance(entries, list) and len(entries) == 1:
        only = _descriptor(entries[0], where)
        if _may_be_disk(config.media_type, only.media_type):
            layers = (Layer(only.digest, only.size, ""),)
            return Manifest(digest, config.digest, _config_size(config, where), layers, disk=True)
    if config.media_type not in _CONFIGS:
        also = " nor an artifact with one layer, a machine's disk" if disks else ""
        raise FailedPrecondition(
            f"{where} is not a container image{also}: its configuration is {config.media_type[:80]!r}"
        )
    _config_size(config, where)
    if not isinstance(entries, list):
        raise _garbage(where, "its manifest has no list of layers")
    if len(entries) > MAX_LAYERS:
        raise FailedPrecondition(
            f"image {where} has {len(entries)} layers, {MAX_LAYERS} can be stacked; build it with fewer"
        )
    stacked = []
    for entry in entries:
        described = _descriptor(entry, where)
        if described.media_type not in _LAYERS:
            raise FailedPrecondition(
                f"image {where} has a layer of the kind {described.media_type[:80]!r}; "
                "plain, gzip and zstd tars can be run"
            )
        compression = _LAYERS[described.media_type]
        stacked.append(Layer(described.digest, described.size, compression))
    return Manifest(digest, config.digest, config.size, tuple(stacked))


def _may_be_disk(config: str, layer: str) -> bool:
    """Tell whether the only layer of an image may be a disk, by the media types of both.

    Tools have many names for disks (application/x-qcow2, ...), or just the layer type of images (oras)."""
    return (layer in _LAYERS and config not in _CONFIGS) or (layer not in _LAYERS and "tar" not in layer)


def _config_size(config: _Descriptor, where: str) -> int:
    if config.size > MAX_CONFIG_BYTES:
        raise _garbage(where, f"its configuration is over {MAX_CONFIG_BYTES} bytes")
    return config.size


def _choose(document: Mapping[str, object], platform: str, where: str) -> str:
    entries = document.get("manifests")
    entries = [] if entries is None else entries
    if not isinstance(entries, list):
        raise _garbage(where, "its index has no list of manifests")
    offered, candidates = [], []
    for entry in entries:
        described = _descriptor(entry, where)
        has = entry.get("platform")
        if described.media_type not in _MANIFESTS + _INDEXES or not isinstance(has, dict | None):
            continue
        if has is None:  # a nested index may have it, and an image's configuration may say it
            candidates.append((2 if described.media_type in _INDEXES else 3, described.digest))
            continue
        offered.append(_platform_of(has.get("os"), has.get("architecture")))
        if offered[-1] == platform:
            candidates.append((int(has.get("variant") not in (None, "", "v1", "v7", "v8")), described.digest))
    if not candidates:
        listed = ", ".join(sorted(set(offered)))[:200] or "nothing"
        raise NotFound(f"image {where} has nothing for {platform}; it has {listed}")
    return min(candidates, key=lambda pair: pair[0])[1]


def _descriptor(entry: object, where: str) -> _Descriptor:
    if not isinstance(entry, dict):
        raise _garbage(where, "a descriptor in its manifest is no object")
    media_type, digest, size = entry.get("mediaType"), entry.get("digest"), entry.get("size")
    if not isinstance(digest, str) or not is_digest(digest):
        raise _garbage(where, "a digest in its manifest is not sha256: and 64 hex digits")
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size < 1 << 50:
        raise _garbage(where, "a size in its manifest is invalid")
    if not isinstance(media_type, str):
        raise _garbage(where, "a descriptor in its manifest has no media type")
    return _Descriptor(media_type, digest, size)


def _object(data: bytes, limit: int, what: str, where: str) -> dict[str, object]:
    if len(data) > limit:
        raise _garbage(where, f"its {what} is over {limit} bytes")
    try:
        document = bounded_json.loads(data)
    except ValueError as error:
        raise _garbage(where, f"its {what}: {error}") from None
    if not isinstance(document, dict):
        raise _garbage(where, f"its {what} is no JSON object")
    return document


def _garbage(where: str, why: str) -> FailedPrecondition:
    return FailedPrecondition(f"the registry's answer for image {where} can't be used: {why}")
