# SPDX-License-Identifier: Apache-2.0
"""Traces: what a call of kubelet's led to, and how long each part took.

`spans` says which span is current and times steps within it, `agent_calls` carries it to the VMs' agents,
and `exported` sends spans to a collector. Nothing here knows of pods.
"""
