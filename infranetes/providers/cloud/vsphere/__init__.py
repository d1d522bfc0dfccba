# SPDX-License-Identifier: Apache-2.0
"""Pods on VMware vSphere."""
