"""From a recorded sandbox to a READY one: the steps, in order. Undoing them is the caller's."""

from __future__ import annotations

import secrets
from typing import Any

import attrs
from twisted.logger import Logger

from infranetes.pods.follow import connect
from infranetes.pods.inventory import Sandbox
from infranetes.pods.node import Node
from infranetes.pods.states import SandboxState
from infranetes.pods.waits import sleep, within
from infranetes.providers.interface import Instance, InstanceSpec, Size
from infranetes_common import cri
from infranetes_common.errors import DeadlineExceeded, FailedPrecondition, Unavailable
from infranetes_common.identity import Identity

CPU_PERIOD = 100_000  # microseconds, the kernel's default
SHARES_PER_CORE = 1024
ENTROPY_BYTES = 64  # for the kernel of a clone, which has its template's

_log = Logger()


def size_of(config: cri.PodSandboxConfig) -> Size:
    """What the pod says it needs: its limits, else its requests, with its runtime class's overhead."""
    parts = (config.linux.resources, config.linux.overhead)
    return Size(
        cpu_millis=sum(_cpu_millis(part) for part in parts),
        memory_bytes=sum(max(part.memory_limit_in_bytes, 0) for part in parts),
    )


def _cpu_millis(resources: Any) -> int:
    if resources.cpu_quota > 0:
        return int(resources.cpu_quota * 1000 // (resources.cpu_period or CPU_PERIOD))
    # kubelet gives a pod without requests 2 shares: that asks for nothing
    return int(resources.cpu_shares * 1000 // SHARES_PER_CORE) if resources.cpu_shares > 2 else 0


async def launch(node: Node, sandbox: Sandbox) -> None:
    """Bring a LAUNCHING sandbox to READY; begun by this daemon or by an earlier one.

    :raise InfranetesError: some step failed; there may be a VM.
    """
    await node.ready.wait()
    clock = node.clock
    began = clock.seconds()
    deadline = began + node.times.launch
    instance = await _running_vm(node, sandbox, deadline)
    vm_seconds = clock.seconds() - began
    connect(node, sandbox)
    await _greet(node, sandbox, deadline)
    assert sandbox.client is not None and sandbox.view is not None
    await sandbox.client.configure(sandbox.config)
    sandbox.view.start()
    left = deadline - clock.seconds()
    await within(clock, left, sandbox.view.when_live(), f"the agent's stream of sandbox {sandbox.id}")
    if not sandbox.view.live:
        raise Unavailable(f"the agent of sandbox {sandbox.id} went away")
    await node.commit(sandbox, sandbox.record.to(SandboxState.READY))
    _log.info(
        "sandbox {sandbox} is ready: vm {vm} at {address}, {seconds:.2f} s ({vm_seconds:.2f} s for the VM)",
        sandbox=sandbox.id,
        vm=instance.id,
        address=instance.address,
        seconds=clock.seconds() - began,
        vm_seconds=vm_seconds,
    )


async def _running_vm(node: Node, sandbox: Sandbox, deadline: float) -> Instance:
    """Ask for the VM, and wait until it runs; each answer is recorded."""
    # The provider is not cut short: only its answer says what there is to be destroyed.
    instance: Instance = await sandbox.ask_for_vm(node.provider.launch(_spec(node, sandbox)))
    sandbox.instance = instance
    await node.save(sandbox, attrs.evolve(sandbox.record, instance_id=instance.id))
    left = deadline - node.clock.seconds()
    instance = await within(
        node.clock,
        left + 5,  # the provider's own deadline says more about why
        node.provider.wait_running(instance.id, max(left, 1.0)),
        f"the VM of sandbox {sandbox.id}",
    )
    sandbox.instance = instance
    record = attrs.evolve(
        sandbox.record,
        address=instance.address,
        agent_host=instance.agent_host or instance.address,
        agent_port=instance.agent_port,
    )
    await node.save(sandbox, record)
    return instance


def _spec(node: Node, sandbox: Sandbox) -> InstanceSpec:
    certificate, key = node.authority.issue_vm(sandbox.id, node.times.certificate)
    config = sandbox.config
    identity = Identity(
        sandbox_id=sandbox.id,
        certificate_pem=certificate,
        key_pem=key,
        ca_pem=node.authority.ca_pem,
        hostname=config.hostname,
        machine_id=sandbox.id,
        entropy=secrets.token_hex(ENTROPY_BYTES),
        now_nanos=node.now(),
    )
    return InstanceSpec(
        token=sandbox.record.token,
        sandbox_id=sandbox.id,
        cluster=node.names.cluster,
        node=node.names.node,
        identity=identity,
        size=size_of(config),
        annotations=dict(config.annotations),
    )


async def _greet(node: Node, sandbox: Sandbox, deadline: float) -> None:
    """Wait until the agent answers, and make sure that it is the right one."""
    delay = 0.05
    assert sandbox.client is not None
    while True:
        left = deadline - node.clock.seconds()
        try:
            info = await sandbox.client.info(within=max(min(left, 10.0), 0.1))
            break
        except (Unavailable, DeadlineExceeded) as error:
            if left <= delay:
                raise DeadlineExceeded(
                    f"the agent of sandbox {sandbox.id} did not answer within {node.times.launch:.0f} s: "
                    f"{error}"
                ) from None
        await sleep(node.clock, delay)
        delay = min(delay * 1.5, 2.0)
    if info.sandbox_id != sandbox.id:
        raise FailedPrecondition(
            f"the machine at {sandbox.record.agent_host} is not sandbox {sandbox.id}: its agent answers for "
            f"{info.sandbox_id[:64] or 'none'}"
        )
