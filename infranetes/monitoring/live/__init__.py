# SPDX-License-Identifier: Apache-2.0
"""Pages that follow what they show: server-sent events, bounded in number and in size."""
