# SPDX-License-Identifier: Apache-2.0
"""Breaks the wiring on purpose: does the comparison with transformers notice?"""
