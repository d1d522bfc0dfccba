# SPDX-License-Identifier: Apache-2.0
"""A sandbox's VM, and what its agent says of the containers."""
