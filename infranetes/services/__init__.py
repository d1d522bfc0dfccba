# SPDX-License-Identifier: Apache-2.0
"""Kubernetes' Services in the pods' VMs: the node watches them once, and each VM is told what changes.

    objects    JSON of the API server  →  Service, EndpointSlice, ServiceNode: values, checked
    endpoints  the slices of a Service →  the endpoints that a connection may go to
    rules      a Service and endpoints →  a Rule for each address, protocol and port
    table      all rules, numbered by change; what a VM lacks that has them up to a number
    messages   what a VM lacks, as it is sent, once for all that lack the same

All of these are plain values and functions: nothing here reads, writes or waits.
"""
