# SPDX-License-Identifier: Apache-2.0
"""What to do with captured rows while a model serves: a plug-in package and two programs."""
