# SPDX-License-Identifier: Apache-2.0
"""Attention of captured queries, from the pages of the KV cache; the formula, with focus.

layers.py    finds the attention of decoder layers
reader.py    weights of captured queries
keys.py      keys and values of one layer
latent.py    the same over a latent cache
pages.py     how layers see keys, and where the cache has them
products.py  products of queries with keys of many requests in one launch
formula.py   weights of logits, focused ones too, in torch: on a CPU, and as captured
"""
