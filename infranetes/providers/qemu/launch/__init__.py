# SPDX-License-Identifier: Apache-2.0
"""Making VMs and ending them, and finding those that earlier daemons have made."""
