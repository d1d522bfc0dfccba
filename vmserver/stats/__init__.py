# SPDX-License-Identifier: Apache-2.0
"""Resource usage of the VM and its containers, read from the kernel's own files on request."""
