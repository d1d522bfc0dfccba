# SPDX-License-Identifier: Apache-2.0
"""The AppArmor profile of a container."""

from __future__ import annotations

from pathlib import Path

from infranetes_common.errors import InvalidArgument
from infranetes_common.wire import cri
from vmserver.containers import apparmor, security
from vmserver.containers.oci.kernel import Kernel

DEFAULT_PROFILE = "infranetes-default"

_PROFILE = cri.SecurityProfile
_TEMPLATE = Path(__file__).parent / "apparmor-default.in"


def profile_reference(context: cri.LinuxContainerSecurityContext, kernel: Kernel) -> str:
    """Return the reference of the container's profile, for `apparmor.ProfileLoader`; "": not confined.

    If the context names no profile, a container has the default one if the VM has AppArmor, and a privileged
    container has none.

    :raise InvalidArgument: the profile is malformed.
    """
    profile = security.apparmor_profile(context)
    if profile.kind == _PROFILE.Localhost:
        return profile.reference
    if profile.kind == _PROFILE.RuntimeDefault:
        return default_reference() if kernel.apparmor and not context.privileged else ""
    if profile.kind != _PROFILE.Unconfined:
        raise InvalidArgument(f"security_context.apparmor: {profile.kind} is not a known type of profile")
    return ""


def profile_name(context: cri.LinuxContainerSecurityContext, kernel: Kernel) -> str:
    """Return the name of the container's profile; "": it is not confined.

    :raise InvalidArgument: the profile is malformed."""
    reference = profile_reference(context, kernel)
    return apparmor.split_reference(reference)[0] if reference else ""


def default_reference() -> str:
    """Return the default profile as a reference."""
    return f"{DEFAULT_PROFILE}\n{_TEMPLATE.read_text().replace('@NAME@', DEFAULT_PROFILE)}"
