# SPDX-License-Identifier: Apache-2.0
"""Sparse autoencoders: their files, and what features of rows are. No part of an engine.

files.py        files of the tools that train them, as tensors of one kind
scopes.py       files of published suites, likewise
tensors.py      the one kind, and checks of tensors and configurations
scaling.py      scales that depend on the row
autoencoder.py  activations of rows, features as operations
places.py       places on a device that have one autoencoder after the other
"""
