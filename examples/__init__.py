# SPDX-License-Identifier: Apache-2.0
"""Programs that use steering and capture as anyone would."""
