# SPDX-License-Identifier: Apache-2.0
"""The captured rows of all pipeline stages as one result."""

from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.executor import Executor
from vllm.v1.outputs import ModelRunnerOutput


class StageRows(KVOutputAggregator):
    """In the place of the aggregator of a KV connector, which capture excludes: with one, the
    executor has all workers reply to a step, not only the last stage's first."""

    def __init__(self) -> None:
        super().__init__(expected_finished_count=0)

    def aggregate(
        self, outputs: list[ModelRunnerOutput | None], output_rank: int = 0
    ) -> ModelRunnerOutput | None:
        """The last stage's output with the rows of all stages.

        Args:
            outputs: of all workers by rank, so in the order of the stages.
        """
        output = outputs[output_rank]
        rows = [o.captured for o in outputs if o is not None and o.captured is not None]
        if output is None or not rows:
            return output
        for later in rows[1:]:
            rows[0].join(later)
        output.captured = rows[0]
        return output


def collect_stages(executor: Executor) -> None:
    """Have the rows of all stages arrive, where there are several and they capture."""
    config = executor.vllm_config
    if config.capture_config.enabled and config.parallel_config.pipeline_parallel_size > 1:
        executor.kv_output_aggregator = StageRows()
