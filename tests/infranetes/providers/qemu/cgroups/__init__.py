# SPDX-License-Identifier: Apache-2.0
"""The control groups of VMs' processes."""
