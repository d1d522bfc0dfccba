# SPDX-License-Identifier: Apache-2.0
"""The control groups that VMs' processes are put into."""
