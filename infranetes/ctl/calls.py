# SPDX-License-Identifier: Apache-2.0
"""The calls that infranetes-ctl's commands make, and the exit status that follows from the answer."""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable

from google.protobuf.message import Message

from infranetes.ctl.render_services import same
from infranetes.ctl.selecting import named, selected
from infranetes.ctl.session import DONE, FAILED
from infranetes_common.wire import control
from infranetes_common.wire.control_rpcs import ControlStub

ASK_SECONDS = 150.0  # the daemon gives the provider two minutes for a list
END_SECONDS = 600.0
_NANOS = 1e9

Ask = Callable[[ControlStub, argparse.Namespace], Awaitable[tuple[Message, int]]]
"""Asks the daemon; gives its answer and the exit status."""


async def pods(stub: ControlStub, options: argparse.Namespace) -> tuple[control.ListPodsResponse, int]:
    """Ask for the pods that the command line selects. :raise NotFound: one that it names is not there."""
    answer = await stub.ListPods(control.ListPodsRequest(past=options.all), timeout=ASK_SECONDS)
    chosen = list(selected(answer.pods, options, lambda pod: pod))
    if not options.watch:
        chosen = named(chosen, options.names, names_of_pod, "pod")
    elif options.names:  # which may come later
        chosen = [pod for pod in chosen if {*names_of_pod(pod)} & {*options.names}]
    del answer.pods[:]
    answer.pods.extend(chosen)
    return answer, DONE


def names_of_pod(pod: control.Pod | control.PodUsage) -> tuple[str, str, str]:
    """Return the words that mean a pod."""
    return f"{pod.namespace}/{pod.name}", pod.name, pod.id


async def containers(
    stub: ControlStub, options: argparse.Namespace
) -> tuple[control.ListContainersResponse, int]:
    """Ask for the containers that the command line selects.

    :raise NotFound: one that it names is not there, or the pod."""
    answer = control.ListContainersResponse()
    async for part in stub.ListContainers(control.ListContainersRequest(), timeout=ASK_SECONDS):
        answer.MergeFrom(part)
    chosen = list(selected(answer.containers, options, lambda each: each.pod))
    if options.pod:
        chosen = named(chosen, [options.pod], _names_of_pod_of, "pod")
    chosen = named(chosen, () if options.watch else options.names, _names_of_container, "container")
    if not options.all and not options.names:
        chosen = [each for each in chosen if each.container.state == "running"]
    chosen.sort(key=lambda each: (-each.container.created_at, each.container.id))
    return control.ListContainersResponse(containers=chosen), DONE


def _names_of_pod_of(listed: control.ListedContainer) -> tuple[str, str, str]:
    pod = listed.pod
    return f"{pod.namespace}/{pod.name}", pod.name, pod.sandbox_id


def _names_of_container(listed: control.ListedContainer) -> tuple[str, str]:
    return listed.container.name, listed.container.id


async def events(stub: ControlStub, options: argparse.Namespace) -> tuple[control.ListEventsResponse, int]:
    """Ask for the events that the command line selects."""
    since = int(options.since * _NANOS) if options.since is not None else 0
    answer = control.ListEventsResponse()
    request = control.ListEventsRequest(pod=options.pod, since=since)
    async for part in stub.ListEvents(request, timeout=ASK_SECONDS):
        answer.MergeFrom(part)
    chosen = selected(answer.events, options, lambda event: event.pod)
    kept = [event for event in chosen if event.step.error or not options.failed]
    return control.ListEventsResponse(events=kept), DONE


async def describe(stub: ControlStub, options: argparse.Namespace) -> tuple[control.DescribePodResponse, int]:
    return await stub.DescribePod(control.DescribePodRequest(pod=options.pod), timeout=ASK_SECONDS), DONE


async def orphans(stub: ControlStub, options: argparse.Namespace) -> tuple[control.ListOrphansResponse, int]:
    answer = await stub.ListOrphans(control.ListOrphansRequest(), timeout=ASK_SECONDS)
    return answer, FAILED if answer.troubles else DONE


async def end_orphans(
    stub: ControlStub, options: argparse.Namespace
) -> tuple[control.EndOrphansResponse, int]:
    request = control.EndOrphansRequest(ids=options.ids, dry_run=options.dry_run)
    answer = await stub.EndOrphans(request, timeout=END_SECONDS)
    return answer, FAILED if answer.failed or answer.troubles else DONE


async def pool(stub: ControlStub, options: argparse.Namespace) -> tuple[control.GetPoolResponse, int]:
    return await stub.GetPool(control.GetPoolRequest(handler=options.handler), timeout=ASK_SECONDS), DONE


async def drain(stub: ControlStub, options: argparse.Namespace) -> tuple[control.DrainPoolResponse, int]:
    request = control.DrainPoolRequest(dry_run=options.dry_run, handler=options.handler)
    answer = await stub.DrainPool(request, timeout=END_SECONDS)
    return answer, FAILED if answer.left else DONE


async def fill(stub: ControlStub, options: argparse.Namespace) -> tuple[control.FillPoolResponse, int]:
    return await stub.FillPool(control.FillPoolRequest(handler=options.handler), timeout=ASK_SECONDS), DONE


async def console(stub: ControlStub, options: argparse.Namespace) -> tuple[control.GetConsoleResponse, int]:
    request = control.GetConsoleRequest(sandbox=options.pod)
    return await stub.GetConsole(request, timeout=ASK_SECONDS), DONE


async def services(stub: ControlStub, options: argparse.Namespace) -> tuple[Message, int]:
    if options.trace is not None:
        return await trace(stub, options)
    request = control.GetServicesRequest(pod=options.pod, service=options.service)
    answer = control.GetServicesResponse()
    async for part in stub.GetServices(request, timeout=ASK_SECONDS):
        answer.MergeFrom(part)
    current = all(vm.current for vm in answer.vms) if answer.vms else False
    return answer, DONE if current or not options.pod else FAILED


async def trace(stub: ControlStub, options: argparse.Namespace) -> tuple[control.TraceServiceResponse, int]:
    to = options.trace
    request = control.TraceServiceRequest(
        pod=options.pod, address=to.address, protocol=to.protocol, port=to.port
    )
    answer = await stub.TraceService(request, timeout=ASK_SECONDS)
    return answer, DONE if answer.vm.current and same(answer) else FAILED


async def policies(stub: ControlStub, options: argparse.Namespace) -> tuple[control.GetPoliciesResponse, int]:
    answer = await stub.GetPolicies(control.GetPoliciesRequest(pod=options.pod), timeout=ASK_SECONDS)
    current = not answer.enabled or all(pod.current for pod in answer.pods)
    return answer, DONE if current or not options.pod else FAILED


async def sizes(stub: ControlStub, options: argparse.Namespace) -> tuple[control.ChooseSizeResponse, int]:
    request = control.ChooseSizeRequest(
        cpu_millis=options.cpu,
        memory_bytes=options.memory,
        overhead_bytes=options.overhead,
        gpus=options.gpus,
        provider=options.provider,
        limit=options.limit,
    )
    answer = await stub.ChooseSize(request, timeout=ASK_SECONDS)
    return answer, DONE if answer.fitting else FAILED


async def config(stub: ControlStub, options: argparse.Namespace) -> tuple[control.GetConfigResponse, int]:
    return await stub.GetConfig(control.GetConfigRequest(), timeout=ASK_SECONDS), DONE
