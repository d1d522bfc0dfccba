# SPDX-License-Identifier: Apache-2.0
"""Kubernetes' NetworkPolicies: what they come to for each pod of the node."""
