# SPDX-License-Identifier: Apache-2.0
"""Modules that run in a worker: they copy what was decided, and cannot fail.

runner.py              entry: the one object that model runners call
tap_layers.py          finds the wired decoder layers of a model
transformers_taps.py   wires layers of the Transformers backend
tap_check.py           start-up check: every site moves its row
model_variants.py      the model with taps and without, and its graphs, switched by step
site_sets.py           for which sets of sites it has graphs
graph_owners.py        what upstream keeps of graphs, and which are recorded when
token_map.py           which table row and program each token of a step gets
capture_arena.py       which arena row each captured token of a step gets
row_map.py             where taps read that
steering_table.py      sums of vectors
term_table.py          operations other than addition
projection_table.py    `project` matrices, and scores of rows
attention_layers.py    finds the attention of decoder layers
attention_check.py     start-up proof of attention weights
attention_requests.py  whose attention is read, and of which keys
block_attention.py     what a step reads of attention, block by block
attention_reader.py    weights of captured queries
layer_reader.py        keys and values of one layer
latent_reader.py       the same over a latent cache
kv_pages.py            how layers see keys, and where the cache has them
paged_products.py      products of queries with keys of many requests in one launch
focus_layers.py        the layers that requests may focus
focus_table.py         what their programs do at each layer
focus_kernel.py        focused attention on a GPU
focus_triton.py        its two kernels
focused_weights.py     focused weights in torch: on a CPU, and as captured
lens_check.py          start-up check: which norm is before the head
lens_files.py          matrices of lenses from files
lens_reader.py         rows under a lens: through that norm and the head
outbox.py              captured rows from the device to the host
pinning.py             the host memory where they land, made known to the GPU
"""
