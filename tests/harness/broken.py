# SPDX-License-Identifier: Apache-2.0
"""A test module that can't be imported, because a module that it imports is missing."""

import a_part_that_is_missing  # type: ignore[import-not-found]  # noqa: F401
