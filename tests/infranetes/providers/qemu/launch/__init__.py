# SPDX-License-Identifier: Apache-2.0
"""VMs are made, ended and found again."""
