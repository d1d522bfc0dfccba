# SPDX-License-Identifier: Apache-2.0
"""What processors report on confidential VMs, and who judges it."""
