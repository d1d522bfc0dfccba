# SPDX-License-Identifier: Apache-2.0
"""Shadow sandboxes at the delegate: what gives a pod of ours the network of the node's CNI.

Each is a pod sandbox of the delegate without containers, made of the pod's own configuration. So the CNI,
its arguments, host ports, policies and NRI plug-ins see the pod; its namespace is where the VM's tap goes.
Nothing has to be remembered of them: the label SHADOW_OF says whose each is, and SHADOW_BY which daemon's, as
several may have one delegate.
"""

from __future__ import annotations

import contextlib
import json
import os

import attrs
from google.protobuf.message import Message

from infranetes.delegate.channel import Delegate
from infranetes.delegate.hidden import SHADOW_BY, SHADOW_OF
from infranetes_common.errors import FailedPrecondition, NotFound, Unavailable
from infranetes_common.wire import cri
from txgrpc import Code, GrpcError

_RUN_SECONDS = 200.0  # includes the pull of a pause image; kubelet asks again after 240
_END_SECONDS = 100.0
_ASK_SECONDS = 15.0
_RUNTIME = "/runtime.v1.RuntimeService"
_MAX_PATH = 4096


@attrs.frozen
class Shadow:
    """A shadow sandbox as the delegate lists it."""

    id: str  # the delegate's id of it
    owner: str  # the id of our sandbox
    ours: bool  # whether this daemon made it, or the one before it
    ready: bool
    created_at: int


class ShadowSandboxes:
    """Makes, finds and ends shadows.

    :param home: the daemon's state directory, which distinguishes its shadows from another daemon's.
    """

    def __init__(self, delegate: Delegate, home: str) -> None:
        self._delegate = delegate
        self._home = home

    async def run(self, config: cri.PodSandboxConfig, owner: str) -> str:
        """Make the shadow of a sandbox of ours, or find the one that was made before. Return its id.

        One that an earlier call left half made is ended first: its name would be taken.

        :raise Unavailable: the delegate can't be asked, or refuses; the message quotes it."""
        found = ""
        for shadow in sorted(await self.list(owner), key=lambda each: each.created_at, reverse=True):
            if shadow.ready and not found:
                found = shadow.id
            else:
                await self.end(shadow.id)
        if found:
            return found
        request = cri.RunPodSandboxRequest(config=shadow_config(config, owner, self._home))
        try:
            answer = await self._call("RunPodSandbox", request, _RUN_SECONDS)
        except Unavailable:
            # RunPodSandbox may have failed late, and left a sandbox that has the name.
            with contextlib.suppress(Unavailable):
                for shadow in await self.list(owner):
                    await self.end(shadow.id)
            raise
        made = cri.RunPodSandboxResponse.FromString(answer).pod_sandbox_id
        self._delegate.hidden.note(made)
        return made

    async def namespace(self, id: str) -> str:
        """Return the path of a shadow's network namespace.

        :raise NotFound: there is no such shadow, or its process has ended.
        :raise FailedPrecondition: the delegate does not tell it."""
        request = cri.PodSandboxStatusRequest(pod_sandbox_id=id, verbose=True)
        answer = cri.PodSandboxStatusResponse.FromString(
            await self._call("PodSandboxStatus", request, _ASK_SECONDS)
        )
        if answer.status.state != cri.SANDBOX_READY:
            raise NotFound(f"the delegate's sandbox {id} has ended")
        path = _namespace_in(answer.info.get("info", ""))
        if not path:
            raise FailedPrecondition(
                f"the delegate does not report the network namespace of its sandbox {id} (runtimeSpec in its "
                "verbose status), which VMs in a CNI's network need: use another release of it"
            )
        return path

    async def end(self, id: str) -> None:
        """Stop and remove a shadow. Idempotent.

        :raise Unavailable: the delegate can't be asked, or it failed; the message quotes it."""
        self._delegate.hidden.note(id)  # before its removal, while it is known to be a shadow
        requests = (
            ("StopPodSandbox", cri.StopPodSandboxRequest(pod_sandbox_id=id)),
            ("RemovePodSandbox", cri.RemovePodSandboxRequest(pod_sandbox_id=id)),
        )
        for rpc, request in requests:
            with contextlib.suppress(NotFound):
                await self._call(rpc, request, _END_SECONDS)

    async def list(self, owner: str = "") -> list[Shadow]:
        """Return all shadows, also other daemons', or those of one sandbox of ours.

        :raise Unavailable: the delegate can't be asked."""
        wanted = cri.PodSandboxFilter(label_selector={SHADOW_OF: owner} if owner else {})
        request = cri.ListPodSandboxRequest(filter=wanted)
        answer = await self._call("ListPodSandbox", request, _ASK_SECONDS)
        return [
            self._seen(each)
            for each in cri.ListPodSandboxResponse.FromString(answer).items
            if SHADOW_OF in each.labels and owner in ("", each.labels[SHADOW_OF])
        ]

    def _seen(self, told: cri.PodSandbox) -> Shadow:
        self._delegate.hidden.note(told.id)
        ours = told.labels.get(SHADOW_BY) == self._home
        return Shadow(told.id, told.labels[SHADOW_OF], ours, told.state == cri.SANDBOX_READY, told.created_at)

    async def _call(self, rpc: str, request: Message, seconds: float) -> bytes:
        try:
            return await self._delegate.call(
                f"{_RUNTIME}/{rpc}", request.SerializeToString(), timeout=seconds
            )
        except GrpcError as error:
            words = f"the delegate's {rpc} for a pod's network failed: {error.message}"
            raise (NotFound if error.code is Code.NOT_FOUND else Unavailable)(words) from error


def shadow_config(config: cri.PodSandboxConfig, owner: str, home: str) -> cri.PodSandboxConfig:
    """The pod's configuration as its shadow has it: with our labels, and without what only the VM has."""
    shadow = cri.PodSandboxConfig()
    shadow.CopyFrom(config)
    shadow.labels[SHADOW_OF] = owner
    shadow.labels[SHADOW_BY] = home
    seccomp = config.linux.security_context.seccomp
    shadow.linux.ClearField("sysctls")  # the guest sets them
    shadow.linux.ClearField("security_context")
    namespaces = shadow.linux.security_context.namespace_options
    namespaces.network = cri.POD
    namespaces.pid = cri.CONTAINER  # with POD, CRI-O would keep a pause process
    if config.linux.security_context.HasField("seccomp"):
        shadow.linux.security_context.seccomp.CopyFrom(seccomp)
    return shadow


def _namespace_in(info: str) -> str:
    """Return the path in a verbose status; "": it has none that can be kept."""
    try:
        namespaces = json.loads(info)["runtimeSpec"]["linux"]["namespaces"]
        [path] = [each["path"] for each in namespaces if each.get("type") == "network" and "path" in each]
    except (ValueError, LookupError, TypeError, AttributeError):
        return ""
    # A path below /proc/PID may be another process's tomorrow.
    kept = isinstance(path, str) and os.path.isabs(path) and not path.startswith("/proc/")
    return path if kept and len(path) <= _MAX_PATH and path.isprintable() else ""
