# SPDX-License-Identifier: Apache-2.0
"""`infranetes-ctl sleep` and `wake`: pods that take no memory until somebody needs them."""

from __future__ import annotations

from infranetes.ctl.session import DONE, Session
from infranetes_common.wire import control

SECONDS = 300.0


async def fall_asleep(session: Session) -> int:
    """Have the daemon let a pod sleep. :raise GrpcError: the daemon refuses."""
    answer = await session.stub.SleepPod(control.SleepPodRequest(pod=session.options.pod), timeout=SECONDS)
    if session.options.json:
        session.document(
            {"sandbox_id": answer.vm.sandbox_id, "bytes": answer.size, "seconds": answer.seconds}
        )
    else:
        size = f"{answer.size / 2**20:.0f} MiB on the disk"
        session.print(f"{_pod(answer.vm)} sleeps: {size}, after {answer.seconds:.2f} s")
    return DONE


async def wake(session: Session) -> int:
    """Have the daemon wake a pod. :raise GrpcError: the daemon refuses, or the pod is lost."""
    answer = await session.stub.WakePod(control.WakePodRequest(pod=session.options.pod), timeout=SECONDS)
    if session.options.json:
        session.document(
            {"sandbox_id": answer.vm.sandbox_id, "slept": answer.slept, "seconds": answer.seconds}
        )
    else:
        done = f"is awake after {answer.seconds:.2f} s" if answer.slept else "was awake"
        session.print(f"{_pod(answer.vm)} {done}")
    return DONE


def _pod(vm: control.VmOfPod) -> str:
    return f"{vm.namespace}/{vm.name}"
