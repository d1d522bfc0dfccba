# SPDX-License-Identifier: Apache-2.0
"""Names in a container's configuration that have a meaning on the node only, replaced for the agent.

The path of a seccomp profile is replaced by the profile's text, which is bounded and checked here. The name
of an image that is mounted as a volume is replaced by its id. (`volumes` handles mounts of paths.)
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Container

from infranetes.images import Image
from infranetes.pods.node.images import Images
from infranetes_common.errors import FailedPrecondition, InvalidArgument, NotFound
from infranetes_common.wire import cri

MAX_PROFILE_BYTES = 256 * 1024

_TERMINATION_MESSAGE = "io.kubernetes.container.terminationMessagePath"  # kubelet's annotation
_LOCALHOST = cri.SecurityProfile.Localhost
_OLD_PREFIX = "localhost/"
_FIELD = "config.linux.security_context.seccomp"


def same_request(first: cri.ContainerConfig, second: cri.ContainerConfig) -> bool:
    """Return whether two configurations ask for the same container.

    kubelet generates a configuration anew for each call: each time the file of the termination message has
    another name, and the variables of services come in another order."""
    return _comparable(first) == _comparable(second)


def _comparable(config: cri.ContainerConfig) -> bytes:
    copy = cri.ContainerConfig()
    copy.CopyFrom(config)
    for mount in copy.mounts:
        if mount.container_path == config.annotations.get(_TERMINATION_MESSAGE):
            mount.host_path = ""
    variables = sorted(config.envs, key=lambda variable: variable.key)
    del copy.envs[:]
    copy.envs.extend(variables)
    return copy.SerializeToString(deterministic=True)


def seccomp_path(config: cri.ContainerConfig) -> str | None:
    """Return the path of the node's seccomp profile that the container asks for; None: for none.

    :raise InvalidArgument: the path is not absolute."""
    context = config.linux.security_context
    if context.HasField("seccomp"):
        if context.seccomp.profile_type != _LOCALHOST:
            return None
        path = context.seccomp.localhost_ref.removeprefix(_OLD_PREFIX)
    elif context.seccomp_profile_path.startswith(_OLD_PREFIX):
        path = context.seccomp_profile_path.removeprefix(_OLD_PREFIX)
    else:
        return None
    if not path.startswith("/") or "\0" in path or len(path) > 4096:
        raise InvalidArgument(
            f"{_FIELD}: Localhost needs a profile's absolute path on the node, not {path[:256]!r}"
        )
    return path


def check_target_container(config: cri.ContainerConfig, containers: Container[str]) -> None:
    """Check that the container whose processes `config` wants to see is one of `containers`.

    :raise FailedPrecondition: it is not."""
    options = config.linux.security_context.namespace_options
    if options.pid == cri.TARGET and options.target_id not in containers:
        raise FailedPrecondition(
            f"config.linux.security_context.namespace_options.target_id {options.target_id[:64]!r}: no "
            "container of this sandbox has this id"
        )


def read_seccomp_profile(path: str) -> str:
    """Return the text of the profile. Blocks.

    :raise FailedPrecondition: the file does not exist, or can't be read.
    :raise InvalidArgument: it is not a profile."""
    named = f"{_FIELD}: the profile {path[:256]}"
    try:
        # Without O_NONBLOCK, opening a FIFO would block.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise InvalidArgument(f"{named} is no file")
            data = file.read(MAX_PROFILE_BYTES + 1)
    except FileNotFoundError:
        raise FailedPrecondition(
            f"{named} is not on this node: put it there, or ask for RuntimeDefault"
        ) from None
    except OSError as error:
        raise FailedPrecondition(f"{named} can't be read: {error.strerror}") from None
    if len(data) > MAX_PROFILE_BYTES:
        raise InvalidArgument(f"{named} has over {MAX_PROFILE_BYTES} bytes")
    try:
        profile = json.loads(data)
    except (ValueError, RecursionError):
        raise InvalidArgument(f"{named} is no JSON") from None
    if not isinstance(profile, dict) or not isinstance(profile.get("defaultAction"), str):
        raise InvalidArgument(f"{named} is no object with a defaultAction")
    return data.decode()


def with_seccomp_profile(config: cri.ContainerConfig, text: str) -> cri.ContainerConfig:
    """Return a copy of `config` with the profile's text in place of its path."""
    sent = cri.ContainerConfig()
    sent.CopyFrom(config)
    context = sent.linux.security_context
    context.ClearField("seccomp_profile_path")
    context.seccomp.profile_type = _LOCALHOST
    context.seccomp.localhost_ref = text
    return sent


async def mounted_images(config: cri.ContainerConfig, images: Images) -> dict[int, Image]:
    """Return the images that are mounted as volumes, by the index of their mount.

    :raise NotFound: one is not on this node; the message names the mount."""
    mounted: dict[int, Image] = {}
    for index, mount in enumerate(config.mounts):
        if mount.HasField("image"):
            try:
                mounted[index] = await images.find(mount.image.image)
            except NotFound as error:
                raise NotFound(f"config.mounts[{index}] at {mount.container_path[:256]}: {error}") from None
    return mounted


def with_image_ids(config: cri.ContainerConfig, images: dict[int, Image]) -> cri.ContainerConfig:
    """Return a copy of `config` whose mounts name images by id.

    :param images: as `mounted_images` returns them."""
    sent = cri.ContainerConfig()
    sent.CopyFrom(config)
    for index, image in images.items():
        sent.mounts[index].image.CopyFrom(cri.ImageSpec(image=image.id))
    return sent
