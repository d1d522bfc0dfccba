# SPDX-License-Identifier: Apache-2.0
"""The parts of a CRI LinuxContainerSecurityContext that mean the same to all providers."""

from __future__ import annotations

import attrs

from infranetes_common.errors import InvalidArgument
from infranetes_common.wire import cri

MAX_PROFILE_BYTES = 256 * 1024
ALL = "ALL"

_PROFILE = cri.SecurityProfile


@attrs.frozen
class Profile:
    """The kind of a seccomp or AppArmor profile and, for one from the node, the text that the node sent."""

    kind: int
    reference: str = ""


def refuse(present: bool, field: str, what: str) -> None:
    """Refuse something that is not supported. :raise InvalidArgument: it is present."""
    if present:
        raise InvalidArgument(f"{field}: {what} is not supported by this runtime; leave it out")


def capabilities(requested: cri.Capability) -> tuple[list[str], list[str]]:
    """Return the capabilities to add and to drop.

    A name in both lists is dropped; dropping ALL keeps the added ones.

    :raise InvalidArgument: a name can't be a capability's."""
    drop = [capability(name) for name in requested.drop_capabilities]
    add = [capability(name) for name in requested.add_capabilities]
    return [name for name in add if name not in drop], drop


def capability(name: str) -> str:
    """Return a capability's full name, or ALL. :raise InvalidArgument: it can't be one."""
    if not name.replace("_", "").isalpha() or not name.isascii():
        raise InvalidArgument(f"security_context.capabilities: {name[:80]!r} is not a capability")
    upper = name.upper()
    return upper if upper == ALL or upper.startswith("CAP_") else "CAP_" + upper


def seccomp_profile(context: cri.LinuxContainerSecurityContext) -> Profile:
    """Return the seccomp profile. :raise InvalidArgument: the deprecated field is malformed."""
    return _profile(context, "seccomp", context.seccomp_profile_path, _PROFILE.Unconfined)


def apparmor_profile(context: cri.LinuxContainerSecurityContext) -> Profile:
    """Return the AppArmor profile; `apparmor` reads its reference.

    :raise InvalidArgument: the deprecated field is malformed."""
    return _profile(context, "apparmor", context.apparmor_profile, _PROFILE.RuntimeDefault)


def _profile(context: cri.LinuxContainerSecurityContext, field: str, old: str, default: int) -> Profile:
    """Return a profile. :param old: the deprecated field's value."""
    if context.HasField(field):
        profile = getattr(context, field)
        return Profile(profile.profile_type, profile.localhost_ref)
    if old.startswith("localhost/"):
        return Profile(_PROFILE.Localhost, old.removeprefix("localhost/"))
    known: dict[str, int] = {"": default, "unconfined": _PROFILE.Unconfined}
    for name in ("runtime/default", "docker/default"):
        known[name] = _PROFILE.RuntimeDefault
    if old not in known:
        raise InvalidArgument(
            f"security_context.{field}: {old[:80]!r} is not a profile; known are runtime/default, "
            "unconfined and localhost/PATH"
        )
    return Profile(known[old])
