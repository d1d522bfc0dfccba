"""A CRI LinuxContainerSecurityContext in Docker's words; what Docker can't give is refused by name.

Docker's and the CRI's defaults differ: a seccomp profile that the CRI leaves out is none, and paths are
masked as they are listed, so both are always said to Docker.
"""

from __future__ import annotations

import json
from typing import Any

from infranetes_common import cri
from infranetes_common.errors import InvalidArgument
from vmserver.containers.docker import apparmor

NAME_PREFIX = "infranetes-"
MAX_PROFILE_BYTES = 256 * 1024

_PROFILE = cri.SecurityProfile
_ALL = "ALL"
_DEFAULT_ERRNO = 1  # EPERM: the only one that this Docker has for a profile's default action


def refuse(present: bool, field: str, what: str) -> None:
    """:raise InvalidArgument: it is there."""
    if present:
        raise InvalidArgument(f"{field}: {what} can't be had in this runtime; leave it out")


def put(linux: Any, host: dict[str, Any]) -> None:
    """Add to HostConfig all but the user and groups.

    :raise InvalidArgument: something that can't be had; names the field.
    """
    context = linux.security_context
    refuse(
        bool(context.capabilities.add_ambient_capabilities),
        "security_context.capabilities.add_ambient_capabilities",
        "ambient capabilities",
    )
    host["CapAdd"], host["CapDrop"] = capabilities(context.capabilities)
    host["Privileged"] = context.privileged
    host["ReadonlyRootfs"] = context.readonly_rootfs
    if linux.HasField("security_context") and not context.privileged:
        # Said and empty is "none", as with procMount: Unmasked; unsaid leaves Docker's own.
        host["MaskedPaths"] = list(context.masked_paths)
        host["ReadonlyPaths"] = list(context.readonly_paths)
    host["SecurityOpt"] = options(context)
    host.update(namespaces(context.namespace_options))


def capabilities(wanted: Any) -> tuple[list[str], list[str]]:
    """CapAdd and CapDrop. What is both added and dropped is dropped; ALL dropped leaves what is added."""
    drop = [_capability(name) for name in wanted.drop_capabilities]
    add = [_capability(name) for name in wanted.add_capabilities]
    return [name for name in add if name not in drop], drop


def _capability(name: str) -> str:
    if not name.replace("_", "").isalpha() or not name.isascii():
        raise InvalidArgument(f"security_context.capabilities: {name[:80]!r} is no capability")
    upper = name.upper()
    return upper if upper == _ALL or upper.startswith("CAP_") else "CAP_" + upper


def options(context: Any) -> list[str]:
    """HostConfig.SecurityOpt."""
    found = ["no-new-privileges"] if context.no_new_privs else []
    kind, reference = _profile(context, "seccomp", context.seccomp_profile_path, _PROFILE.Unconfined)
    if kind == _PROFILE.Unconfined:
        found.append("seccomp=unconfined")
    elif kind == _PROFILE.Localhost:
        found.append("seccomp=" + seccomp_profile(reference))
    kind, reference = apparmor_profile(context)
    if kind == _PROFILE.Localhost:
        found.append("apparmor=" + apparmor.parted(reference)[0])
    if kind == _PROFILE.Unconfined:
        found.append("apparmor=unconfined")
    return found


def apparmor_profile(context: Any) -> tuple[int, str]:
    """Which AppArmor profile is asked for: its kind and, of the node's, what `apparmor` takes."""
    return _profile(context, "apparmor", context.apparmor_profile, _PROFILE.RuntimeDefault)


def _profile(context: Any, field: str, old: str, unsaid: int) -> tuple[int, str]:
    """Which profile is asked for, by the field of today or the one before it, and its reference."""
    if context.HasField(field):
        profile = getattr(context, field)
        return profile.profile_type, profile.localhost_ref
    if old.startswith("localhost/"):
        return _PROFILE.Localhost, old.removeprefix("localhost/")
    known = {"": unsaid, "unconfined": _PROFILE.Unconfined}
    for name in ("runtime/default", "docker/default"):
        known[name] = _PROFILE.RuntimeDefault
    if old not in known:
        raise InvalidArgument(
            f"security_context.{field}: {old[:80]!r} is no profile; known are runtime/default, unconfined "
            "and localhost/PATH"
        )
    return known[old], ""


def seccomp_profile(text: str) -> str:
    """A profile's JSON, as the node read it, for Docker.

    :raise InvalidArgument: no profile, or something in it that Docker would leave out silently.
    """
    field = "security_context.seccomp"
    if len(text.encode()) > MAX_PROFILE_BYTES:
        raise InvalidArgument(f"{field}: the profile has over {MAX_PROFILE_BYTES} bytes")
    try:
        profile = json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidArgument(f"{field}: the profile that the node sent is no JSON") from None
    if not isinstance(profile, dict) or not isinstance(profile.get("defaultAction"), str):
        raise InvalidArgument(f"{field}: the profile is no object with a defaultAction")
    rules = profile.get("syscalls") or []
    if not isinstance(rules, list) or not all(isinstance(rule, dict) for rule in rules):
        raise InvalidArgument(f"{field}: the profile's syscalls are no list of objects")
    actions = {profile["defaultAction"], *(str(rule.get("action")) for rule in rules)}
    refuse(
        "SCMP_ACT_NOTIFY" in actions or bool(profile.get("listenerPath")),
        field,
        "a profile that asks a listener (SCMP_ACT_NOTIFY)",
    )
    refuse(bool(profile.get("flags")), field, "a profile with flags")
    default = profile.get("defaultErrnoRet", _DEFAULT_ERRNO)
    refuse(
        profile["defaultAction"] == "SCMP_ACT_ERRNO" and default != _DEFAULT_ERRNO,
        field,
        f"a profile whose defaultErrnoRet is not {_DEFAULT_ERRNO} (EPERM)",
    )
    return json.dumps(profile)


def namespaces(wanted: Any) -> dict[str, str]:
    """The machine is the pod: its network, IPC and process namespaces are the pod's and the "node's"."""
    refuse(wanted.network in (cri.CONTAINER, cri.TARGET), "namespace_options.network", "a network of its own")
    refuse(wanted.ipc == cri.TARGET, "namespace_options.ipc", "another container's IPC")
    users = wanted.userns_options
    refuse(
        bool(users.uids or users.gids) or (wanted.HasField("userns_options") and users.mode != cri.NODE),
        "namespace_options.userns_options",
        "a user namespace",
    )
    if wanted.pid == cri.TARGET and not wanted.target_id:
        raise InvalidArgument("namespace_options.target_id: empty, but pid is TARGET")
    pid = {
        cri.POD: "host",
        cri.NODE: "host",
        cri.CONTAINER: "",
        cri.TARGET: f"container:{NAME_PREFIX}{wanted.target_id}",
    }[wanted.pid]
    return {"PidMode": pid, "IpcMode": "private" if wanted.ipc == cri.CONTAINER else "host"}
