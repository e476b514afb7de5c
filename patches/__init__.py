# SPDX-License-Identifier: Apache-2.0
"""What turns the pinned upstream tree into ours: `seams/` (patches) and `taps/` (a codemod)."""
