# SPDX-License-Identifier: Apache-2.0
"""Lets vLLM's V2 model runner run on a CPU, under Triton's interpreter."""
