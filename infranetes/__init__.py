# SPDX-License-Identifier: Apache-2.0
"""The node daemon: a Kubernetes container runtime whose pods are virtual machines."""
