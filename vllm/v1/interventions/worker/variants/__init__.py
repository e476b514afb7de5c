# SPDX-License-Identifier: Apache-2.0
"""Variants of the model, and the sets of sites that have graphs.

variants.py   the model with taps and without, and its graphs, switched by step
site_sets.py  for which sets of sites it has graphs
graphs.py     what upstream keeps of graphs, and which are recorded when
recording.py  one graph recorded, with memory given back or kept
"""
