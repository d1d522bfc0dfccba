# SPDX-License-Identifier: Apache-2.0
"""The settings that an image's configuration gives to its containers.

Source: OCI image-spec, config.md. Anybody may have made the image, so every value is checked.
"""

from __future__ import annotations

import posixpath
import re
import signal
from collections.abc import Mapping
from types import MappingProxyType

import attrs

from infranetes_common import bounded_json
from infranetes_common.errors import InvalidArgument
from infranetes_common.wire import cri
from vmserver.containers import mount_checks
from vmserver.containers.signals import signal_number
from vmserver.validate import DIGEST, MAX_LAYERS

MAX_BYTES = 4 * 1024 * 1024
MAX_ENTRIES = 8192  # per list or object
_SIGNAL = re.compile(r"(?:SIG)?([A-Z0-9]+)(?:([+-])([0-9]{1,2}))?")


@attrs.frozen
class ImageDefaults:
    """The settings that a container takes from its image unless its own configuration overrides them."""

    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    user: str = ""
    working_dir: str = ""
    stop_signal: str = ""
    labels: Mapping[str, str] = MappingProxyType({})
    volumes: tuple[str, ...] = ()
    diff_ids: tuple[str, ...] = ()  # of the image's layers, lowest first


def image_defaults(configuration: bytes) -> ImageDefaults:
    """Parse an image's configuration.

    :raise InvalidArgument: it is not one; names the field.
    """
    if len(configuration) > MAX_BYTES:
        raise InvalidArgument(f"the image's configuration has over {MAX_BYTES} bytes")
    try:
        whole = bounded_json.loads(configuration)
    except ValueError:
        raise InvalidArgument("the image's configuration is not JSON") from None
    config = _object(whole, "config") if isinstance(whole, dict) else None
    if config is None:
        raise InvalidArgument("the image's configuration is not an object")
    diff_ids = _strings(_object(whole, "rootfs"), "diff_ids")
    if len(diff_ids) > MAX_LAYERS or not all(DIGEST.fullmatch(one) for one in diff_ids):
        raise InvalidArgument(f"rootfs.diff_ids of the image: expected up to {MAX_LAYERS} digests of sha256")
    labels = _object(config, "Labels")
    if not all(_is_text(value) for value in labels.values()):
        raise _unexpected("Labels", "an object of strings")
    return ImageDefaults(
        entrypoint=_strings(config, "Entrypoint"),
        command=_strings(config, "Cmd"),
        env=_strings(config, "Env"),
        user=_string(config, "User"),
        working_dir=_string(config, "WorkingDir"),
        stop_signal=_string(config, "StopSignal"),
        labels=MappingProxyType({name: str(value) for name, value in labels.items()}),
        volumes=tuple(sorted(_object(config, "Volumes"))),
        diff_ids=diff_ids,
    )


def stop_signal(config: cri.ContainerConfig, image: ImageDefaults) -> int:
    """Return the number of the signal that asks the container to end.

    An image's that this machine does not know counts as SIGTERM.

    :raise InvalidArgument: the container's own does not exist."""
    if config.stop_signal != cri.RUNTIME_DEFAULT:
        return signal_number(config.stop_signal)
    return _named_signal(image.stop_signal) or signal.SIGTERM


def image_volumes(config: cri.ContainerConfig, image: ImageDefaults) -> list[str]:
    """Return where the image wants volumes and the configuration mounts nothing else."""
    taken = {mount_checks.target(mount) for mount in config.mounts}
    found = {posixpath.normpath(path) for path in image.volumes if path.startswith("/")}
    return sorted(path for path in found - taken if path.strip("/"))


def _named_signal(name: str) -> int:
    """Return the number of SIGTERM, TERM, 15 or SIGRTMIN+3; 0 for none of these."""
    if name.isascii() and name.isdecimal() and len(name) < 4:
        return int(name) if int(name) < signal.NSIG else 0
    match = _SIGNAL.fullmatch(name.upper())
    known = {each: int(number) for each, number in signal.Signals.__members__.items()}  # SIGCLD too
    if match is None or f"SIG{match[1]}" not in known:
        return 0
    number = known[f"SIG{match[1]}"] + int(f"{match[2] or '+'}{match[3] or 0}")
    return number if 0 < number < signal.NSIG else 0


def _object(parent: Mapping[str, object], name: str) -> Mapping[str, object]:
    found = parent.get(name)
    if found is None:
        return {}
    if not isinstance(found, dict) or len(found) > MAX_ENTRIES or not all(map(_is_text, found)):
        raise _unexpected(name, "an object")
    return found


def _strings(parent: Mapping[str, object], name: str) -> tuple[str, ...]:
    found = parent.get(name)
    if found is None:
        return ()
    if not isinstance(found, list) or len(found) > MAX_ENTRIES:
        raise _unexpected(name, "a list")
    strings = tuple(str(one) for one in found if _is_text(one))
    if len(strings) != len(found):
        raise _unexpected(name, "a list of strings")
    return strings


def _string(parent: Mapping[str, object], name: str) -> str:
    found = parent.get(name)
    if found is None:
        return ""
    if not _is_text(found):
        raise _unexpected(name, "a string")
    return str(found)


def _is_text(value: object) -> bool:
    """Return whether `value` is a string that can be an argument or a path: no NUL, no lone surrogate."""
    return isinstance(value, str) and "\0" not in value and _is_encodable(value)


def _is_encodable(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _unexpected(name: str, what: str) -> InvalidArgument:
    return InvalidArgument(f"{name} in the image's configuration: expected {what}")
