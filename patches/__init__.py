# SPDX-License-Identifier: Apache-2.0
"""Turns the pinned upstream tree into ours: `seams/` are patches, `taps/` is a codemod."""
