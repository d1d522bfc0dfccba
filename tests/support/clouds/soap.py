# SPDX-License-Identifier: Apache-2.0
"""SOAP messages: what the simulated vCenter reads of requests, and adds to vcsim's answers."""

from __future__ import annotations

import re
from html import unescape

from tests.support.clouds.faults import Fault, FaultKind

_NAMESPACES = (
    'xmlns:soapenv="http://schemas.xmlsoap.org/soap/envelope/" '
    'xmlns:xsd="http://www.w3.org/2001/XMLSchema" xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance"'
)

LIST = "List"  # the action, in faults, of the one call that lists the VMs of a folder
_ACTION = re.compile(r"<(?:\w+:)?Body[^>]*>\s*<(\w+)")
_THIS = re.compile(r"<_this[^>]*>([^<]+)</_this>")

_INNER = {
    "ManagedObjectNotFound": '<obj type="VirtualMachine">vm-0</obj>',
    "TaskInProgress": '<task type="Task">task-0</task>',
    "InvalidPowerState": (
        "<requestedState>poweredOn</requestedState><existingState>poweredOff</existingState>"
    ),
    "NotAuthenticated": '<object type="Folder">f-0</object><privilegeId>System.Ledger</privilegeId>',
}


def envelope(body: str) -> bytes:
    """Return a whole message with this body."""
    head = f'<?xml version="1.0" encoding="UTF-8"?>\n<soapenv:Envelope {_NAMESPACES}>'
    return f"{head}<soapenv:Body>{body}</soapenv:Body></soapenv:Envelope>".encode()


def reconfigure(vm: str, spec: str) -> bytes:
    """Return a request that reconfigures a VM."""
    this = f'<_this type="VirtualMachine">{vm}</_this>'
    return envelope(f'<ReconfigVM_Task xmlns="urn:vim25">{this}{spec}</ReconfigVM_Task>')


def refusal(rule: Fault) -> tuple[int, bytes] | None:
    """Return the answer to a request that had no effect."""
    if rule.kind is FaultKind.THROTTLE:
        return 429, b"Too Many Requests"
    if rule.kind is FaultKind.ERROR:
        return 503, b"Service Unavailable"
    name = refused_with(rule)
    return (500, fault(name)) if name else None


def refused_with(rule: Fault) -> str:
    """Return the name of vCenter's fault; "": what answers is a proxy before it, or nothing does."""
    return {
        FaultKind.QUOTA: "NotEnoughLicenses",
        FaultKind.CAPACITY: "InsufficientResourcesFault",
        FaultKind.UNKNOWN: "ManagedObjectNotFound",
        FaultKind.REVOKED: "NotAuthenticated",
        FaultKind.BUSY: "TaskInProgress",
    }.get(rule.kind, "")


def fault(name: str, inner: str = "") -> bytes:
    """Return a fault of vCenter's. :param inner: its fields."""
    inner = inner or _INNER.get(name, "")
    detail = f'<{name}Fault xmlns="urn:vim25" xsi:type="{name}">{inner}</{name}Fault>'
    return envelope(
        f"<soapenv:Fault><faultcode>ServerFaultCode</faultcode><faultstring>the test's {name}</faultstring>"
        f"<detail>{detail}</detail></soapenv:Fault>"
    )


def parameters_of(body: str) -> dict[str, str]:
    """Return what is called, as `Action`, of which object, as `this`, and the `body`."""
    action, this = _ACTION.search(body), _THIS.search(body)
    name = action[1] if action is not None else ""
    if name == "RetrievePropertiesEx" and "childEntity" in body:
        name = LIST
    return {"Action": name, "this": unescape(this[1]) if this is not None else "", "body": body}
