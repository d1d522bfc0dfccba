# SPDX-License-Identifier: Apache-2.0
"""`make demo`: one pod VM from its image to its end, step by step."""
