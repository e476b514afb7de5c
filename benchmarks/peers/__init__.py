# SPDX-License-Identifier: Apache-2.0
"""Us and what else one could use, in one run on one machine: a script a peer."""
