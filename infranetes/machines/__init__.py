# SPDX-License-Identifier: Apache-2.0
"""A pod's VM, from its launch to its end. Nothing here knows sandboxes."""
