# SPDX-License-Identifier: Apache-2.0
"""The options of a FlexVolume. Users of the cluster write them, so they are checked and bounded."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping

import attrs

FILESYSTEMS = ("ext4", "xfs")
MAX_GROUP = 2**32 - 2  # the largest gid
MAX_ID = 128  # bytes of a volume's id, or name
MAX_SIZE = 1 << 60
MAX_BYTES = 128 * 1024  # of all options: the kernel's limit for an argument
MAX_OPTIONS = 256
MAX_VALUE = 4096

# The options that kubelet adds.
_OWN = "kubernetes.io/"
_FS_TYPE = "kubernetes.io/fsType"
_READ_WRITE = "kubernetes.io/readwrite"
_GROUP = "kubernetes.io/mounterArgs.FsGroup"
_UID = "kubernetes.io/pod.uid"
_POD = "kubernetes.io/pod.name"
_NAMESPACE = "kubernetes.io/pod.namespace"
_NAME = "kubernetes.io/pvOrVolumeName"

# The options that the volume's author sets.
_KNOWN = ("volumeID", "size", "format", "device", "mount", "deviceOnly")

_SIZE = re.compile(r"([0-9]{1,18})(Ki|Mi|Gi|Ti|Pi|k|M|G|T|P)?")
_UNITS = {
    "Ki": 1 << 10,
    "Mi": 1 << 20,
    "Gi": 1 << 30,
    "Ti": 1 << 40,
    "Pi": 1 << 50,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "P": 10**15,
    None: 1 << 30,  # as in the first FlexVolume driver, and in the clouds
}
_TRUTH = {
    **dict.fromkeys(("1", "t", "T", "true", "TRUE", "True"), True),
    **dict.fromkeys(("0", "f", "F", "false", "FALSE", "False"), False),
}


class InvalidOptions(Exception):
    """A request that is not supported; the message says what is."""


@attrs.frozen
class Volume:
    """A volume as a pod wants it.

    :ivar volume: its id, or its name among those of the pod's namespace.
    :ivar size: in bytes, of a volume that is to be made if there is none; 0: it has to be there.
    :ivar group: the group that is to own its files."""

    volume: str
    size: int
    filesystem: str
    read_only: bool
    group: int | None
    pod_uid: str
    namespace: str


def read(text: str) -> Mapping[str, str]:
    """Return the options, as kubelet gives them. :raise Refused: they are none."""
    if len(text.encode(errors="surrogateescape")) > MAX_BYTES:
        raise InvalidOptions(f"the options have over {MAX_BYTES} bytes")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidOptions("the options are no JSON") from None
    if not isinstance(found, dict) or len(found) > MAX_OPTIONS:
        raise InvalidOptions(f"the options are no JSON object of up to {MAX_OPTIONS} members")
    for key, value in found.items():
        if not isinstance(value, str):
            raise InvalidOptions(f"option {key[:80]!r} is no text")
        if key.startswith(_OWN):
            continue  # secrets among them, which are not used here
        if key not in _KNOWN:
            raise InvalidOptions(f"option {key[:80]!r} is unknown; known are {', '.join(_KNOWN)}")
        if len(value) > MAX_VALUE or not value.isprintable():
            raise InvalidOptions(
                f"option {key}: {value[:80]!r} is too long, or has characters that can't be shown"
            )
    return found


def volume(options: Mapping[str, str]) -> Volume:
    """Return the volume to mount. :raise Refused: the options ask for something unsupported."""
    if _truth(options, "deviceOnly", False) or not _truth(options, "mount", True):
        raise InvalidOptions(
            "volumes are file systems: a disk that is not mounted (deviceOnly, mount: false) is not offered"
        )
    given = options.get("volumeID", "")
    size = _size(options["size"]) if options.get("size") else 0
    if not given and not size:
        raise InvalidOptions(
            "neither volumeID nor size is given: say which volume, or how large one is to be made"
        )
    uid = options.get(_UID, "")
    if not 0 < len(uid) <= MAX_ID or not uid.isprintable():
        raise InvalidOptions(f"{_UID} is missing, or is not the uid of a pod")
    return Volume(
        _id(given) if given else _name(options),
        size,
        _filesystem(options),
        _read_only(options),
        _group(options.get(_GROUP, "")),
        uid,
        _part(options, _NAMESPACE),
    )


def name(options: Mapping[str, str]) -> str:
    """Return the volume's name in the cluster. :raise Refused: it has no name."""
    found = options.get("volumeID") or options.get(_NAME, "")
    if not found:
        raise InvalidOptions("the volume has no name: give volumeID")
    return _id(found)


def _id(given: str) -> str:
    if len(given.encode(errors="surrogateescape")) > MAX_ID or not given.isascii() or not given.isprintable():
        raise InvalidOptions(f"volumeID: {given[:80]!r} can't be a volume's id")
    return given


def _name(options: Mapping[str, str]) -> str:
    """Return the name of a volume that is this pod's alone. A pod that is made anew under its name, such as a
    StatefulSet's, has the same. Neither part has an underscore."""
    found = "_".join(_part(options, key) for key in (_POD, _NAME))
    return found if len(found) <= MAX_ID else hashlib.sha256(found.encode()).hexdigest()


def _part(options: Mapping[str, str], key: str) -> str:
    found = options.get(key, "")
    if not re.fullmatch(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", found):
        raise InvalidOptions(f"{key}: {found[:80]!r} can't be a name in Kubernetes")
    return found


def _size(given: str) -> int:
    match = _SIZE.fullmatch(given)
    found = int(match[1]) * _UNITS[match[2]] if match is not None else 0
    if not 0 < found <= MAX_SIZE:
        raise InvalidOptions(f"size: {given[:80]!r} is not a size such as 10 (GiB), 10Gi or 500M")
    return found


def _filesystem(options: Mapping[str, str]) -> str:
    """Return the file system's type. `format` may also be a truth value; only blank disks are formatted."""
    wanted = [options.get(_FS_TYPE, "")]
    if options.get("format", "") not in _TRUTH:
        wanted.append(options.get("format", ""))
    found = {each for each in wanted if each}
    if len(found) > 1:
        raise InvalidOptions(f"fsType and format name different file systems: {' and '.join(wanted)[:160]!r}")
    chosen = found.pop() if found else FILESYSTEMS[0]
    if chosen not in FILESYSTEMS:
        raise InvalidOptions(
            f"the file system {chosen[:80]!r} is not offered; known are {' and '.join(FILESYSTEMS)}"
        )
    return chosen


def _read_only(options: Mapping[str, str]) -> bool:
    found = options.get(_READ_WRITE, "rw")
    if found not in ("ro", "rw"):
        raise InvalidOptions(f"{_READ_WRITE}: {found[:80]!r} is neither ro nor rw")
    return found == "ro"


def _group(given: str) -> int | None:
    if not given:
        return None
    if not given.isascii() or not given.isdigit() or len(given) > 10 or int(given) > MAX_GROUP:
        raise InvalidOptions(f"{_GROUP}: {given[:80]!r} is no group's id")
    return int(given)


def _truth(options: Mapping[str, str], key: str, default: bool) -> bool:
    given = options.get(key, "")
    if not given:
        return default
    if given not in _TRUTH:
        raise InvalidOptions(f"option {key}: {given[:80]!r} is neither true nor false")
    return _TRUTH[given]
