# SPDX-License-Identifier: Apache-2.0
"""The demo: a tiny language model is trained, a mood is found in it, and it is steered."""
