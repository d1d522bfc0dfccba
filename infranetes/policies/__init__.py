# SPDX-License-Identifier: Apache-2.0
"""Kubernetes' NetworkPolicies: what they come to for each pod of the node.

    interface   what who enforces them is given
    objects     JSON of the API server  →  Pod, Policy: values, checked
    selectors   labels that are selected
    addresses   ranges of addresses, united to networks
    selections  the pods that a policy's peer means, as they come and go
    firewall    the rules of a pod's policies  →  a PodFirewall
    model       the cluster's objects, and which local pods a change touches
    cluster     the model, fed from the API server

Only `cluster` and `kinds` know where objects come from; the others neither read, write nor wait.
"""
