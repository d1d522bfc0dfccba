# SPDX-License-Identifier: Apache-2.0
"""A pod's virtual machine, from its launch to its end; knows no sandbox."""
