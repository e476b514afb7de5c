# SPDX-License-Identifier: Apache-2.0
"""Modules that run in a worker: they copy what was decided, and cannot fail.

runner.py     entry: the one object that model runners call
check/        proofs at start-up
tables/       vector sums, operations and matrices on the device
rows/         captured rows, from the arena to the host
making/       values that are made of captured rows
attention/    attention of captured queries
focus/        focused attention
variants/     the model with taps and without, and its graphs
layers.py     finds the wired decoder layers of a model; wires those of the Transformers backend
token_map.py  which table row and program each token of a step gets
"""
