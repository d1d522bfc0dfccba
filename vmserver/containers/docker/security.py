# SPDX-License-Identifier: Apache-2.0
"""Translation of a CRI LinuxContainerSecurityContext to Docker's HostConfig.

What Docker does not support is refused, naming the field. The defaults differ: in the CRI, no seccomp profile
means unconfined, and only the listed paths are masked, so both are always set explicitly.
"""

from __future__ import annotations

import json

from infranetes_common.errors import InvalidArgument
from infranetes_common.wire import cri
from vmserver.containers import apparmor, security
from vmserver.containers.docker.api import Request
from vmserver.containers.docker.names import INIT_NAME, container_name
from vmserver.containers.security import MAX_PROFILE_BYTES, capabilities, refuse

_PROFILE = cri.SecurityProfile
_DEFAULT_ERRNO = 1  # EPERM: this Docker supports no other for a profile's default action


def security_fields(linux: cri.LinuxContainerConfig) -> Request:
    """Return the security context as fields of HostConfig, without the user and groups.

    :raise InvalidArgument: something is invalid or not supported; names the field.
    """
    context = linux.security_context
    refuse(
        bool(context.capabilities.add_ambient_capabilities),
        "security_context.capabilities.add_ambient_capabilities",
        "an ambient capability",
    )
    add, drop = capabilities(context.capabilities)
    fields: Request = {
        "CapAdd": add,
        "CapDrop": drop,
        "Privileged": context.privileged,
        "ReadonlyRootfs": context.readonly_rootfs,
        "SecurityOpt": options(context),
        **namespaces(context.namespace_options),
    }
    if linux.HasField("security_context") and not context.privileged:
        # An empty list masks nothing, as with procMount: Unmasked. Without the field, Docker uses its own
        # list.
        fields["MaskedPaths"] = list(context.masked_paths)
        fields["ReadonlyPaths"] = list(context.readonly_paths)
    return fields


def options(context: cri.LinuxContainerSecurityContext) -> list[str]:
    """Return HostConfig.SecurityOpt."""
    found = ["no-new-privileges"] if context.no_new_privs else []
    profile = security.seccomp_profile(context)
    if profile.kind == _PROFILE.Unconfined:
        found.append("seccomp=unconfined")
    elif profile.kind == _PROFILE.Localhost:
        found.append("seccomp=" + seccomp_profile(profile.reference))
    profile = security.apparmor_profile(context)
    if profile.kind == _PROFILE.Localhost:
        found.append("apparmor=" + apparmor.split_reference(profile.reference)[0])
    if profile.kind == _PROFILE.Unconfined:
        found.append("apparmor=unconfined")
    return found


def seccomp_profile(text: str) -> str:
    """Validate the JSON of a profile that the node sent; return it for Docker.

    :raise InvalidArgument: it is not a profile, or has something that Docker would silently ignore.
    """
    field = "security_context.seccomp"
    if len(text.encode()) > MAX_PROFILE_BYTES:
        raise InvalidArgument(f"{field}: the profile has over {MAX_PROFILE_BYTES} bytes")
    try:
        profile = json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidArgument(f"{field}: the profile that the node sent is not JSON") from None
    if not isinstance(profile, dict) or not isinstance(profile.get("defaultAction"), str):
        raise InvalidArgument(f"{field}: the profile is not an object with a defaultAction")
    rules = profile.get("syscalls") or []
    if not isinstance(rules, list) or not all(isinstance(rule, dict) for rule in rules):
        raise InvalidArgument(f"{field}: the profile's syscalls are not a list of objects")
    actions = {profile["defaultAction"], *(str(rule.get("action")) for rule in rules)}
    refuse(
        "SCMP_ACT_NOTIFY" in actions or bool(profile.get("listenerPath")),
        field,
        "a profile with a listener (SCMP_ACT_NOTIFY)",
    )
    refuse(bool(profile.get("flags")), field, "a profile with flags")
    default = profile.get("defaultErrnoRet", _DEFAULT_ERRNO)
    refuse(
        profile["defaultAction"] == "SCMP_ACT_ERRNO" and default != _DEFAULT_ERRNO,
        field,
        f"a profile whose defaultErrnoRet is not {_DEFAULT_ERRNO} (EPERM)",
    )
    return json.dumps(profile)


def namespaces(options: cri.NamespaceOption) -> dict[str, str]:
    """Return PidMode and IpcMode. The VM's own IPC namespace serves both as the pod's and as the node's."""
    refuse(
        options.network in (cri.CONTAINER, cri.TARGET), "namespace_options.network", "a network of its own"
    )
    refuse(options.ipc == cri.TARGET, "namespace_options.ipc", "another container's IPC")
    users = options.userns_options
    refuse(
        bool(users.uids or users.gids) or (options.HasField("userns_options") and users.mode != cri.NODE),
        "namespace_options.userns_options",
        "a user namespace",
    )
    if options.pid == cri.TARGET and not options.target_id:
        raise InvalidArgument("namespace_options.target_id: empty, but pid is TARGET")
    pid_modes: dict[int, str] = {
        cri.POD: f"container:{INIT_NAME}",
        cri.NODE: "host",
        cri.CONTAINER: "",
        cri.TARGET: f"container:{container_name(options.target_id)}",
    }
    return {
        "PidMode": pid_modes[options.pid],
        "IpcMode": "private" if options.ipc == cri.CONTAINER else "host",
    }
