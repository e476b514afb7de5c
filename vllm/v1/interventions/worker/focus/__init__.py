# SPDX-License-Identifier: Apache-2.0
"""Focused attention of the tokens of a step.

layers.py  the layers that requests may focus
table.py   what their programs do at each layer
kernel.py  focused attention on a GPU
triton.py  its two kernels
"""
