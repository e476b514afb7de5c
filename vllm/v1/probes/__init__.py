# SPDX-License-Identifier: Apache-2.0
"""Probes of several layers: what they are, their files, and the scores that they give.

heads.py   what a row's products become: numbers of a linear head or of an MLP
pools.py   what the numbers of an answer's rows become: a score at each row
probe.py   a probe, with both
files.py   its file, and what scikit-learn and torch save
"""
