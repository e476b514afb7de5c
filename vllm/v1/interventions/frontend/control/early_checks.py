# SPDX-License-Identifier: Apache-2.0
"""Refuses what would fail once the model is loaded, before it is: that takes minutes."""

from typing import TYPE_CHECKING

from vllm.v1.steering.rule_files import read_rules_file, read_webhook
from vllm.v1.steering.startup_files import need_startup_files

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def check_early(config: "VllmConfig") -> None:
    """Check the places that the options name.

    Raises:
        ValueError: a file of a module or of rules cannot be read, or a consumer refuses its
            options.
    """
    need_startup_files(config.steering_config)
    if config.capture_config.rules is not None:
        read_rules_file(config.capture_config.rules)
        read_webhook(config.capture_config.rules)
    if config.parallel_config.data_parallel_size_local:  # engines of other hosts have other disks
        for spec in config.capture_config.consumers.values():
            spec.check()
