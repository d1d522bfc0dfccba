# SPDX-License-Identifier: Apache-2.0
"""Kubernetes' NetworkPolicies, and the firewall that results for each pod of the node.

    interface   the types for the code that enforces them
    objects     JSON of the API server  →  Pod, Policy: values, checked
    selectors   label selectors
    addresses   ranges of addresses, merged into networks
    selections  the pods that a policy's peer selects, kept up to date
    firewall    the rules of a pod's policies  →  a PodFirewall
    model       the cluster's objects, and the local pods that a change affects
    cluster     the model, fed from the API server

Only `cluster` and `kinds` know where objects come from; the other modules neither read, write nor wait.
"""
