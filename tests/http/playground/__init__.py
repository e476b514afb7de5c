# SPDX-License-Identifier: Apache-2.0
"""The playground in a real Chromium, against a server of its own."""
