# SPDX-License-Identifier: Apache-2.0
"""Seccomp profiles: from the JSON of Docker and containerd to the `linux.seccomp` of the OCI runtime-spec.

A profile may have rules for some architectures, kernels and capabilities only; those that apply remain. The
default profile is in `seccomp-default.json`. Sources: github.com/moby/profiles, seccomp/seccomp_linux.go; OCI
runtime-spec, config-linux.md.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path

from infranetes_common.errors import InvalidArgument
from infranetes_common.wire import cri
from vmserver.containers import security
from vmserver.containers.oci.kernel import Kernel
from vmserver.containers.oci.limits import Spec

DEFAULT_FILE = Path(__file__).parent / "seccomp-default.json"

_FIELD = "security_context.seccomp"
_PROFILE = cri.SecurityProfile
_ACTIONS = frozenset(
    f"SCMP_ACT_{name}"
    for name in ("ALLOW", "ERRNO", "KILL", "KILL_PROCESS", "KILL_THREAD", "LOG", "TRACE", "TRAP")
)
_WITH_ERRNO = ("SCMP_ACT_ERRNO", "SCMP_ACT_TRACE")
_OPERATORS = frozenset(f"SCMP_CMP_{name}" for name in ("NE", "LT", "LE", "EQ", "GE", "GT", "MASKED_EQ"))
_FLAGS = frozenset(f"SECCOMP_FILTER_FLAG_{name}" for name in ("TSYNC", "LOG", "SPEC_ALLOW"))
_ARCHITECTURE = re.compile(r"SCMP_ARCH_[A-Z0-9_]{1,20}")
_SYSCALL = re.compile(r"[a-zA-Z0-9_]{1,64}")
_KERNEL = re.compile(r"([0-9]{1,6})\.([0-9]{1,6})")
_MAX_ERRNO = 4095
_MAX_ARGS = 6  # of a system call

# By uname's name of the machine: libseccomp's name, and the name in profiles' conditions.
_MACHINES = {
    "x86_64": ("SCMP_ARCH_X86_64", "amd64"),
    "aarch64": ("SCMP_ARCH_AARCH64", "arm64"),
    "riscv64": ("SCMP_ARCH_RISCV64", "riscv64"),
    "ppc64le": ("SCMP_ARCH_PPC64LE", "ppc64le"),
    "s390x": ("SCMP_ARCH_S390X", "s390x"),
}


def container_seccomp(
    context: cri.LinuxContainerSecurityContext, capabilities: Collection[str], kernel: Kernel
) -> Spec | None:
    """Return a container's `linux.seccomp`; None: not confined. Privileged containers never are.

    :param capabilities: the capabilities of its processes.
    :raise InvalidArgument: the node's profile is malformed or not supported.
    """
    profile = security.seccomp_profile(context)
    if context.privileged:
        return None
    if profile.kind == _PROFILE.Localhost:
        return converted(profile.reference, capabilities, kernel)
    if profile.kind == _PROFILE.RuntimeDefault:
        return converted(_default(), capabilities, kernel)
    if profile.kind != _PROFILE.Unconfined:
        raise InvalidArgument(f"{_FIELD}: {profile.kind} is not a known type of profile")
    return None


def converted(text: str, capabilities: Collection[str], kernel: Kernel) -> Spec:
    """Return a profile's rules that apply. :raise InvalidArgument: it is malformed or not supported."""
    profile = _parsed(text)
    native, name = _MACHINES.get(kernel.architecture, ("", kernel.architecture))
    action = _action(profile.get("defaultAction"))
    spec: Spec = {"defaultAction": action}
    if profile.get("defaultErrnoRet") is not None and action in _WITH_ERRNO:
        spec["defaultErrnoRet"] = _number(profile["defaultErrnoRet"], _MAX_ERRNO, "a defaultErrnoRet")
    architectures = _architectures(profile, native)
    if architectures:
        spec["architectures"] = architectures
    flags = [str(flag) for flag in _list(profile.get("flags"), "flags")]
    if not _FLAGS.issuperset(flags):
        raise _malformed(f"the flags {flags!r:.80}: known are {', '.join(sorted(_FLAGS))}")
    if flags:
        spec["flags"] = flags
    rules = [_object(rule) for rule in _list(profile.get("syscalls"), "syscalls")]
    spec["syscalls"] = [
        _rule(rule) for rule in rules if _applies(rule, name, frozenset(capabilities), kernel.release)
    ]
    return spec


@functools.cache
def _default() -> str:
    return DEFAULT_FILE.read_text()


def _parsed(text: str) -> Mapping[str, object]:
    if len(text.encode()) > security.MAX_PROFILE_BYTES:
        raise InvalidArgument(f"{_FIELD}: the profile has over {security.MAX_PROFILE_BYTES} bytes")
    try:
        profile = json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidArgument(f"{_FIELD}: the profile that the node sent is not JSON") from None
    found = _object(profile)
    if found.get("listenerPath"):
        raise _malformed("a listenerPath, which this runtime does not support")
    return found


def _architectures(profile: Mapping[str, object], native: str) -> list[str]:
    """Return the architectures that the rules apply to in addition to the kernel's own."""
    found = [str(name) for name in _list(profile.get("architectures"), "architectures")]
    for each in map(_object, _list(profile.get("archMap"), "archMap")):
        if native and each.get("architecture") == native:
            found += [
                native,
                *(str(name) for name in _list(each.get("subArchitectures"), "subArchitectures")),
            ]
    for name in found:
        if not _ARCHITECTURE.fullmatch(name):
            raise _malformed(f"the architecture {name[:80]!r}")
    return list(dict.fromkeys(found))


def _applies(
    rule: Mapping[str, object], machine: str, capabilities: frozenset[str], release: tuple[int, int]
) -> bool:
    includes, excludes = _condition(rule.get("includes")), _condition(rule.get("excludes"))
    needed, hindering = _least_kernel(includes), _least_kernel(excludes)
    return not (
        machine in excludes["arches"]
        or capabilities & excludes["caps"]
        or (hindering is not None and release >= hindering)
        or (includes["arches"] and machine not in includes["arches"])
        or not capabilities >= includes["caps"]
        or (needed is not None and release < needed)
    )


def _condition(value: object) -> dict[str, frozenset[str]]:
    found = _object(value) if value is not None else {}
    kernel = found.get("minKernel")
    return {
        "arches": frozenset(map(str, _list(found.get("arches"), "arches"))),
        "caps": frozenset(map(str, _list(found.get("caps"), "caps"))),
        "minKernel": frozenset(() if kernel in (None, "") else (str(kernel),)),
    }


def _least_kernel(condition: Mapping[str, frozenset[str]]) -> tuple[int, int] | None:
    for text in condition["minKernel"]:
        match = _KERNEL.fullmatch(text)
        if match is None:
            raise _malformed(f"the minKernel {text[:80]!r}")
        return int(match[1]), int(match[2])
    return None


def _rule(rule: Mapping[str, object]) -> Spec:
    names = [str(name) for name in _list(rule.get("names"), "names")] or [str(rule.get("name"))]
    for name in names:
        if not _SYSCALL.fullmatch(name):
            raise _malformed(f"the system call {name[:80]!r}")
    action = _action(rule.get("action"))
    found: Spec = {"names": names, "action": action}
    if rule.get("errnoRet") is not None and action in _WITH_ERRNO:
        found["errnoRet"] = _number(rule["errnoRet"], _MAX_ERRNO, "an errnoRet")
    arguments = [_argument(_object(each)) for each in _list(rule.get("args"), "args")]
    if arguments:
        found["args"] = arguments
    return found


def _argument(argument: Mapping[str, object]) -> Spec:
    operator = argument.get("op")
    if operator not in _OPERATORS:
        raise _malformed(f"the op {operator!r:.80} of an argument")
    return {
        "index": _number(argument.get("index"), _MAX_ARGS - 1, "the index of an argument"),
        "value": _number(argument.get("value"), 2**64 - 1, "the value of an argument"),
        "valueTwo": _number(argument.get("valueTwo") or 0, 2**64 - 1, "the valueTwo of an argument"),
        "op": operator,
    }


def _action(value: object) -> str:
    if not isinstance(value, str) or value not in _ACTIONS:
        raise _malformed(f"the action {value!r:.80}: known are {', '.join(sorted(_ACTIONS))}")
    return value


def _number(value: object, most: int, what: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        raise _malformed(f"{what} that is not 0 to {most}")
    return value


def _list(value: object, name: str) -> list[object]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise _malformed(f"something else than a list as {name}")
    return value


def _object(value: object) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise _malformed("something else than an object where one belongs")
    return value


def _malformed(what: str) -> InvalidArgument:
    return InvalidArgument(f"{_FIELD}: the profile that the node sent has {what}")
