# SPDX-License-Identifier: Apache-2.0
"""Conformance with Hugging Face: tiny models, a reference by plain hooks, and the comparison."""
