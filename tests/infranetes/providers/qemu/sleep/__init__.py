# SPDX-License-Identifier: Apache-2.0
"""Tests of VMs that sleep."""
