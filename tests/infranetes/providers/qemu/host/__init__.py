# SPDX-License-Identifier: Apache-2.0
"""Users for VMs, and KVM."""
