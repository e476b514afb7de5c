# SPDX-License-Identifier: Apache-2.0
"""The tests; their folders are those of the code they guard."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
"""The repository."""
