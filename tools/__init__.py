# SPDX-License-Identifier: Apache-2.0
"""Builds vLLM Pilot from the pinned upstream wheel and the files of this repository."""
