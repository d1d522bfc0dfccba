# SPDX-License-Identifier: Apache-2.0
"""The control protocol between the simulated provider and its farm of VMs.

One JSON object per line, UTF-8; a request is at most 128 KiB. Requests of one connection are begun in
order; answers carry the request's ``seq`` (any JSON value) and may come in another order::

    {"seq": 1, "op": "boot", "id": "…", "identity": {…}, "tags": {…}, "delay": 0.5, "behaviour": "normal"}
    {"seq": 1, "ok": true, "vm": {…}}
    {"seq": 2, "ok": false, "code": "NOT_FOUND", "error": "why not"}

``code`` is the name of a gRPC status (INVALID_ARGUMENT, NOT_FOUND, INTERNAL).

Operations
----------
``boot``
    Start a VM; answers at once, the VM pending. ``id``: 1 to 64 of ``[0-9a-z-]``, the idempotency key:
    booting an id that is there answers with that VM and changes nothing, unless it is stopped: it is started
    then, with this identity, delay and behaviour. ``identity``: the object of
    `infranetes_common.identity` (its ``listen`` is replaced by a port of the farm's choice on
    127.0.0.1; clock, hostname and network are left alone: the machine is shared). ``tags``: an object
    kept with the VM and shown with it, at most 16 KiB; of them ``images`` is ``layers``, if the VM
    takes those, or ``archives``. ``hardware``: the VM runs in namespaces of its own, has this `Hardware`,
    is given its hostname and machine id, and takes layers; null: it shares the farm's machine.
    ``delay``: seconds until it runs (0).
    ``behaviour`` (see below) and ``after``: seconds, for dies-after.
``halt``
    ``id``. Turn a running VM off, which keeps its record and disk, but not its identity; answers with ``vm``,
    stopped, once that is so. Unknown: NOT_FOUND; not running: FAILED_PRECONDITION.
``end``
    ``id``. Cut the power and forget the VM with all it holds; answers once that is so. Unknown: ok.
``get``
    ``id``. Answers with ``vm``; unknown: NOT_FOUND.
``list``
    Answers ``{"vms": [vm, …]}``, ended ones too.
``behave``
    ``id``, ``behaviour``, ``after``, ``detail``: why it then ends, for dies-after. Change how a VM behaves
    from now on; connections are cut.
``watch``
    From now on this connection is also sent ``{"event": "running"|"ended", "vm": {…}}`` as VMs begin
    to run, or end without ``end`` having been asked for.
``stop``
    End the farm.

A VM
----
::

    {"id": "…", "sandbox_id": "…", "state": "pending"|"running"|"stopped"|"ended", "host": "127.0.0.1",
     "port": 41234, "created_at": 1700000000.25, "behaviour": "normal", "detail": "…", "tags": {…}}

``port`` is 0 until it runs. ``created_at``: seconds since 1970 UTC. ``detail``: why it is as it is.

Behaviours
----------
``normal``       runs after its delay, its agent answers
``never``        stays pending
``no-agent``     runs, its port refuses connections
``unreachable``  runs, its port accepts connections and says nothing
``asleep``       as no-agent: it sleeps
``dies-after``   as normal; ends ``after`` seconds after it began to run

A VM in namespaces of its own runs a moment before its agent answers, as in a cloud.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

MAX_REQUEST = 128 * 1024  # bytes of a line to the farm
MAX_ANSWER = 16 * 1024 * 1024  # bytes of a line from it

PENDING, RUNNING, STOPPED, ENDED = "pending", "running", "stopped", "ended"
NORMAL, NEVER, NO_AGENT, UNREACHABLE, DIES_AFTER = "normal", "never", "no-agent", "unreachable", "dies-after"
ASLEEP = "asleep"
BEHAVIOURS = (NORMAL, NEVER, NO_AGENT, UNREACHABLE, DIES_AFTER, ASLEEP)

IMAGES_TAG, LAYERS, ARCHIVES = "images", "layers", "archives"


class Hardware(TypedDict):
    """The hardware of a VM in namespaces of its own."""

    address: str  # its own address, with the length of the prefix
    gateway: str  # likewise: the machine's address on the VMs' network
    cgroup: str  # the cgroup that the VM's own is below
    keep_layers: bool  # whether it begins with the layers that earlier VMs had


class Vm(TypedDict):
    """A VM, as the farm describes it."""

    id: str
    sandbox_id: str
    state: str
    host: str
    port: int
    created_at: float
    behaviour: str
    detail: str
    tags: Mapping[str, str]


class Answer(TypedDict, total=False):
    """An answer, or an event."""

    seq: object
    ok: bool
    code: str
    error: str
    vm: Vm
    vms: list[Vm]
    event: str
