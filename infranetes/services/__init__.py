# SPDX-License-Identifier: Apache-2.0
"""Kubernetes' Services in the pods' VMs: the node watches them once, and sends the changes to each VM.

    objects    JSON of the API server  →  Service, EndpointSlice, ServiceNode: values, checked
    endpoints  the slices of a Service →  the endpoints that a connection may go to
    rules      a Service and endpoints →  a Rule for each address, protocol and port
    table      all rules, numbered by change; the changes that a VM lacks after a number
    messages   these changes as messages, made once for all VMs that lack the same

`node_proxy` has the node itself translate for VMs that can't.

All of these are plain values and functions: none of them reads, writes or waits.
"""
