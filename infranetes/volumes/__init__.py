# SPDX-License-Identifier: Apache-2.0
"""Files and directories of the node that are mounted in containers: carried into VMs and back."""
