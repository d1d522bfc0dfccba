# SPDX-License-Identifier: Apache-2.0
"""The calls of `Control` about Kubernetes' Services."""

from __future__ import annotations

import ipaddress
from collections.abc import AsyncIterator, Iterator

from twisted.internet.interfaces import IReactorTime

from infranetes.control.chosen import chosen, followed
from infranetes.pods.node.inventory import Inventory, Sandbox
from infranetes.pods.node.meant import sandbox_with_vm
from infranetes.services.cluster import ClusterServices
from infranetes.services.endpoints import Target
from infranetes.services.messages import message_key
from infranetes.services.rules import Key, Rule, Without
from infranetes.services.verdict import Verdict, judge
from infranetes_common.addresses import Address, parse_address
from infranetes_common.concurrency import sleep
from infranetes_common.errors import FailedPrecondition, InfranetesError, InvalidArgument
from infranetes_common.wire import control, vmserver
from infranetes_common.wire.control_rpcs import ControlServiceRpcs
from txgrpc import Call

VM_SECONDS = 10.0  # the longest wait for a VM's answer
PART = 200  # rules in one message
MOST_SHOWN = 1024  # the most endpoints
_PROTOCOLS = ("TCP", "UDP", "SCTP")


class ServiceCalls(ControlServiceRpcs):
    """One method per RPC.

    :param services: None: VMs do not get Services.
    """

    def __init__(self, clock: IReactorTime, inventory: Inventory, services: ClusterServices | None) -> None:
        self._clock = clock
        self._inventory = inventory
        self._services = services

    async def GetServices(
        self, request: control.GetServicesRequest, call: Call
    ) -> AsyncIterator[control.GetServicesResponse]:
        sandboxes = chosen(self._inventory, request.pod)
        if self._services is None:
            yield control.GetServicesResponse()
            return
        table = self._services.table
        vms = [_vm(sandbox) for sandbox in sandboxes]
        if request.pod:
            (sandbox,), (vm,) = sandboxes, vms
            await self._ask(sandbox, vm, None)
        yield control.GetServicesResponse(
            enabled=True,
            followed=followed(self._services),
            complete=table.complete,
            number=table.number,
            rule_count=table.count,
            ranges=map(str, table.ranges),
            vms=vms,
        )
        rules = list(self._rules(request.service))
        for begin in range(0, len(rules), PART):
            part = [self._rule(key, rule) for key, rule in rules[begin : begin + PART]]
            yield control.GetServicesResponse(rules=part)
            await sleep(self._clock, 0)

    async def TraceService(
        self, request: control.TraceServiceRequest, call: Call
    ) -> control.TraceServiceResponse:
        key = _key(request)
        sandbox = sandbox_with_vm(self._inventory, request.pod)
        if self._services is None:
            raise FailedPrecondition(
                "no VM is told of Services: kubernetes.kubeconfig is not set, or service_proxy is off"
            )
        vm = _vm(sandbox)
        if not vm.told:
            raise FailedPrecondition(f"the VM of pod {sandbox.pod} is not told of Services: {vm.trouble}")
        own = [] if vm.by_node else _addresses(sandbox)  # the node's tables know no pod's
        table = self._services.table
        response = control.TraceServiceResponse(
            services=map(str, table.services(key)),
            node=_verdict(judge(table, key, own)),
        )
        in_vm = await self._ask(sandbox, vm, key)
        response.vm.CopyFrom(vm)
        if in_vm is not None:
            response.in_vm.CopyFrom(in_vm)
        return response

    def _rules(self, service: str) -> Iterator[tuple[Key, Rule]]:
        assert self._services is not None
        table = self._services.table
        for change in table.everything():
            matches = not service or service in map(str, table.services(change.key))
            if matches and change.rule is not None:
                yield change.key, change.rule

    def _rule(self, key: Key, rule: Rule) -> control.ServiceRule:
        assert self._services is not None
        return control.ServiceRule(
            address=str(key.address),
            protocol=key.protocol.lower(),
            port=key.port,
            services=map(str, self._services.table.services(key)),
            endpoints=[_endpoint(endpoint) for endpoint in rule.endpoints[:MOST_SHOWN]],
            dropped=rule.without is Without.DROPPED,
            cluster_ip=rule.cluster_ip,
            affinity_seconds=rule.affinity_seconds,
            source_ranges=map(str, rule.source_ranges),
        )

    async def _ask(
        self, sandbox: Sandbox, vm: control.VmServices, key: Key | None
    ) -> control.ServiceVerdict | None:
        """Ask what translates for a VM, and put its report on itself into `vm`. Return that on `key`."""
        proxy = sandbox.machine.node_services or sandbox.client
        if proxy is None:
            vm.counts_trouble = "there is no connection to its agent"
            return None
        try:
            asked = None if key is None else message_key(key)
            answer = await proxy.service_report(asked, VM_SECONDS)
        except InfranetesError as error:
            vm.counts_trouble = str(error)
            return None
        vm.counts.CopyFrom(
            control.ServiceCounts(
                rules=answer.rules,
                refused_packets=answer.refused_packets,
                dropped_packets=answer.dropped_packets,
                flows=answer.flows,
                max_flows=answer.max_flows,
            )
        )
        return _shown_verdict(answer.verdict) if answer.HasField("verdict") else None


def _vm(sandbox: Sandbox) -> control.VmServices:
    metadata, rules = sandbox.config.metadata, sandbox.machine.rules
    vm = control.VmServices(
        sandbox_id=sandbox.id,
        namespace=metadata.namespace,
        name=metadata.name,
        address=sandbox.record.address,
        told=rules is not None,
    )
    if rules is None:
        if sandbox.record.address and not sandbox.machine.has_agent:
            vm.trouble = "it has no agent of ours, and the node does not translate for it"
        else:
            vm.trouble = "its pod does not use them, or the VM is not up yet"
        return vm
    vm.by_node = sandbox.machine.node_services is not None
    progress = rules.progress()
    vm.current, vm.trouble, vm.measured = progress.current, progress.trouble, progress.count
    if progress.number >= 0:
        vm.number = progress.number
    for name in ("behind", "heard_seconds", "last_seconds", "p99_seconds"):
        if (value := getattr(progress, name)) is not None:
            setattr(vm, name, value)
    return vm


def _addresses(sandbox: Sandbox) -> list[Address]:
    try:
        return [ipaddress.ip_address(sandbox.record.address)]
    except ValueError:
        return []


def _key(request: control.TraceServiceRequest) -> Key:
    try:
        address = parse_address(request.address[:64])
    except ValueError:
        raise InvalidArgument(f"{request.address[:64]!r} is no address") from None
    protocol = request.protocol.upper() or "TCP"
    if protocol not in _PROTOCOLS:
        raise InvalidArgument(f"{request.protocol[:20]!r} is none of tcp, udp and sctp")
    if not 0 < request.port < 65536:
        raise InvalidArgument(f"{request.port} is no port")
    return Key(address, protocol, request.port)


def _endpoint(target: Target) -> str:
    address, port = target
    return f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"


def _verdict(verdict: Verdict) -> control.ServiceVerdict:
    return control.ServiceVerdict(
        outcome=verdict.outcome.value,
        why=verdict.why,
        endpoints=[_endpoint(endpoint) for endpoint in verdict.endpoints[:MOST_SHOWN]],
        endpoint_count=len(verdict.endpoints),
        affinity_seconds=verdict.affinity_seconds,
    )


def _shown_verdict(verdict: vmserver.ServiceVerdict) -> control.ServiceVerdict:
    """Return what a VM reports of an address, which may be anything."""
    outcomes = vmserver.ServiceVerdict.Outcome
    is_known = verdict.outcome in outcomes.values()
    targets = [
        (ipaddress.ip_address(endpoint.address), endpoint.port)
        for endpoint in verdict.endpoints
        if len(endpoint.address) in (4, 16)
    ]
    return control.ServiceVerdict(
        outcome=outcomes.Name(verdict.outcome).lower().replace("_", " ") if is_known else "unknown",
        endpoints=map(_endpoint, targets),
        endpoint_count=verdict.endpoint_count,
        affinity_seconds=verdict.affinity_seconds,
    )
