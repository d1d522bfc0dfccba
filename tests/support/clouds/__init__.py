# SPDX-License-Identifier: Apache-2.0
"""Clouds to test against: simulators over HTTP whose VMs have real agents."""
