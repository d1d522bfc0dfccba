"""From a recorded sandbox to a READY one: the steps, in order. Undoing them is the caller's."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

import attrs
from twisted.logger import Logger

from infranetes.pods.follow import connect
from infranetes.pods.inventory import Sandbox
from infranetes.pods.node import Node
from infranetes.pods.renewal import remember, renew
from infranetes.pods.states import SandboxState
from infranetes.pods.waits import sleep, within
from infranetes.providers.interface import Instance, InstanceSpec, InstanceState, Size
from infranetes_common import cri
from infranetes_common.errors import DeadlineExceeded, FailedPrecondition, NotFound, Unavailable
from infranetes_common.identity import Identity

CPU_PERIOD = 100_000  # microseconds, the kernel's default
SHARES_PER_CORE = 1024
ENTROPY_BYTES = 64  # for the kernel of a clone, which has its template's
LAUNCH_CERTIFICATE_SECONDS = 3600.0  # over the time of a launch: until it is replaced over the channel

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
    """Bring a LAUNCHING or BOOTING sandbox to READY; begun by this daemon or by an earlier one.

    :raise InfranetesError: some step failed; there may be a VM.
    """
    await node.ready.wait()
    clock = node.clock
    began = clock.seconds()
    deadline = began + node.times.launch
    had_vm = bool(sandbox.record.agent_host)  # claimed from the pool, or found by an earlier daemon

    def save(record: Any) -> Any:
        return node.save(sandbox, record)

    if had_vm:
        instance = await _known_vm(node, sandbox, deadline)
    else:
        config = sandbox.config
        spec = vm_spec(node, sandbox, size_of(config), config.hostname, dict(config.annotations))
        spec = attrs.evolve(spec, image=sandbox.record.image)
        instance = await running_vm(node, sandbox, spec, save, deadline)
    vm_seconds = clock.seconds() - began
    connect(node, sandbox)
    await greet(node, sandbox, deadline)
    assert sandbox.client is not None and sandbox.view is not None
    if had_vm:
        await renew(node, sandbox, save)
    await sandbox.client.configure(sandbox.config)
    sandbox.view.start()
    left = deadline - clock.seconds()
    await within(clock, left, sandbox.view.when_live(), f"the agent's stream of sandbox {sandbox.id}")
    if not sandbox.view.live:
        raise Unavailable(f"the agent of sandbox {sandbox.id} went away")
    await node.hostports.put(sandbox)
    await node.commit(sandbox, sandbox.record.to(SandboxState.READY))
    _log.info(
        "sandbox {sandbox} is ready: vm {vm} at {address}, {seconds:.2f} s ({vm_seconds:.2f} s for the VM)",
        sandbox=sandbox.id,
        vm=instance.id,
        address=instance.address,
        seconds=clock.seconds() - began,
        vm_seconds=vm_seconds,
    )
    if not had_vm:
        node.renewal.soon(sandbox)


async def _known_vm(node: Node, sandbox: Sandbox, deadline: float) -> Instance:
    """The VM that was seen running before. :raise Unavailable: it is no more."""
    if sandbox.instance is not None and sandbox.instance.state is InstanceState.ENDED:
        raise Unavailable(f"sandbox {sandbox.id}: its VM has ended: {sandbox.instance.detail}")
    if sandbox.instance is None or sandbox.instance.state is not InstanceState.RUNNING:
        left = max(deadline - node.clock.seconds(), 1.0)
        waiting = node.provider.wait_running(sandbox.record.instance_id, left)
        try:
            sandbox.instance = await within(node.clock, left + 5, waiting, f"the VM of sandbox {sandbox.id}")
        except NotFound as error:
            raise Unavailable(f"sandbox {sandbox.id}: its VM is gone: {error}") from None
    instance: Instance = sandbox.instance
    return instance


async def running_vm(
    node: Node, one: Any, spec: InstanceSpec, save: Callable[[Any], Any], deadline: float
) -> Instance:
    """Ask for the VM of `one` (a `HasVm` with its record), and wait until it runs; each answer is recorded.

    :param save: keeps its record, changed; fires when it is on the disk."""
    # The provider is not cut short: only its answer says what there is to be destroyed.
    instance: Instance = await one.ask_for_vm(node.provider.launch(spec))
    one.instance = instance
    await save(attrs.evolve(one.record, instance_id=instance.id))
    left = deadline - node.clock.seconds()
    instance = await within(
        node.clock,
        left + 5,  # the provider's own deadline says more about why
        node.provider.wait_running(instance.id, max(left, 1.0)),
        f"the VM of sandbox {one.id}",
    )
    one.instance = instance
    record = attrs.evolve(
        one.record,
        address=instance.address,
        agent_host=instance.agent_host or instance.address,
        agent_port=instance.agent_port,
    )
    await save(record)
    return instance


def vm_spec(
    node: Node, one: Any, size: Size, hostname: str = "", annotations: dict[str, str] | None = None
) -> InstanceSpec:
    """The VM to be made for `one`, whose record is told of the certificate that goes with it."""
    lifetime = min(node.times.launch + LAUNCH_CERTIFICATE_SECONDS, node.times.certificate)
    signed = node.authority.issue(one.id, lifetime)
    one.record = remember(one.record, signed)
    identity = Identity(
        sandbox_id=one.id,
        certificate_pem=signed.certificate_pem,
        key_pem=signed.key_pem,
        ca_pem=node.authority.ca_pem,
        hostname=hostname,
        machine_id=one.id,
        entropy=secrets.token_hex(ENTROPY_BYTES),
        now_nanos=node.now(),
    )
    return InstanceSpec(
        token=one.record.token,
        sandbox_id=one.id,
        cluster=node.names.cluster,
        node=node.names.node,
        identity=identity,
        size=size,
        annotations=annotations or {},
    )


async def greet(node: Node, sandbox: Any, deadline: float) -> None:
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
