# SPDX-License-Identifier: Apache-2.0
"""VMs that sleep: their memory is in a file, and the daemon has their tap."""
