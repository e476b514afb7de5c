# SPDX-License-Identifier: Apache-2.0
"""End of the layers of a model that is to end after one of them (`capture_stop_after`).

Upstream builds the layers of a pipeline stage and puts `PPMissingLayer` in place of the others,
which every loader that knows stages passes over. Here the layers behind the last one are another
stage's that nobody has.
"""

from vllm.config import get_current_vllm_config_or_none


def last_layer(end: int, depth: int) -> int:
    """Return where a list of layers ends, in a model that is being made.

    Args:
        end: where it ends by pipeline stages.
        depth: number of layers in the list. Lists of another length than the model is deep, such as
            those of an encoder of images, stay whole.
    """
    config = get_current_vllm_config_or_none()
    if config is None or (stop := config.capture_config.capture_stop_after) is None:
        return end
    return min(end, stop + 1) if depth == config.model_config.get_total_num_hidden_layers() else end
