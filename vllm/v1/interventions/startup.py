# SPDX-License-Identifier: Apache-2.0
"""Start-up of the engine core over all workers: taps checked, rows of several workers joined."""

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.logger import init_logger
from vllm.utils.network_utils import make_zmq_socket
from vllm.v1.executor import Executor
from vllm.v1.interventions.named_features import need_feature_files, need_feature_places
from vllm.v1.interventions.shape import LayerShape, TapShape
from vllm.v1.outputs import ModelRunnerOutput

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

logger = init_logger(__name__)


class StageRows(KVOutputAggregator):
    """Joins the captured rows of all workers that send some into one result.

    It takes the place of a KV connector's aggregator, which capture of several workers excludes:
    with an aggregator the executor has all workers reply to a step, not only the first of the last
    stage. `tests/interventions/test_replies.py` holds what executors do with one.
    """

    def __init__(self) -> None:
        super().__init__(expected_finished_count=0)

    def aggregate(
        self, outputs: list[ModelRunnerOutput | None], output_rank: int = 0
    ) -> ModelRunnerOutput | None:
        """The last stage's output with the rows of all workers.

        Args:
            outputs: of all workers by rank, so in the order of their layers.
            output_rank: whose output is returned, of the last stage.
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
    """Install `StageRows` in an executor with several stages that capture, for good."""
    config = executor.vllm_config
    if config.capture_config.enabled and config.parallel_config.pipeline_parallel_size > 1:
        executor.kv_output_aggregator = StageRows()


def step_aggregator(executor: Executor, step: "SchedulerOutput") -> KVOutputAggregator | None:
    """Return the aggregator of a step, for which all workers reply: `StageRows` if its rows are
    split, else the executor's. Without one only the worker replies whose tokens count."""
    ours = step.interventions
    if executor.kv_output_aggregator is None and ours is not None and ours.split:
        return StageRows()
    return executor.kv_output_aggregator


def start_taps(executor: "Executor") -> TapShape | None:
    """Check the taps of all workers, merge what they offer (pipeline stages own layers), and have
    the rows of all stages arrive.

    Returns:
        What the model offers; None where nothing is steered or captured.

    Raises:
        RuntimeError: a site does not move its row, or a layer is not wired.
    """
    # Late: attention decides when it is imported whether breakable CUDA graphs end before it, and
    # a frontend, which imports this file, has not read its model's config by then.
    from vllm.v1.interventions.worker.check.taps import check_worker

    shapes = [s for s in executor.collective_rpc(check_worker) if s is not None]
    if not shapes:
        return None
    layers: dict[int, LayerShape] = {}
    for shape in shapes:
        for n, layer in shape.layers.items():
            layers[n] = layers[n].joined(layer) if n in layers else layer
    stop = shapes[0].stop
    num_layers = executor.vllm_config.model_config.get_total_num_hidden_layers()
    kept = range(num_layers if stop is None else stop + 1)
    if missing := sorted(set(kept) - set(layers)):
        raise RuntimeError(
            f"decoder layers {missing} are of a class that is not wired for steering or capture; "
            "start without enable_steering and capture_consumers, or wire it in patches/taps"
        )
    collect_stages(executor)
    shape = msgspec.structs.replace(shapes[0], layers=dict(sorted(layers.items())))
    steering = executor.vllm_config.steering_config
    features = steering.feature_files
    need_feature_files(features, shape)
    need_feature_places(steering.feature_places, shape)
    return msgspec.structs.replace(shape, features=features)


def report_death(send_outputs: Callable[..., None]) -> Callable[..., None]:
    """Have frontends told that the engine is dead when the thread that sends them outputs fails.

    Without it every later request would wait for ever, and the server would call itself healthy.

    Args:
        send_outputs: `EngineCoreProc.process_output_sockets`.
    """

    @wraps(send_outputs)
    def send_or_report(core: Any, output_paths: list[str], *others: Any) -> None:
        try:
            send_outputs(core, output_paths, *others)
        except BaseException:
            logger.exception("outputs cannot be sent any more: the engine is dead")
            with zmq.Context() as context:
                for path in output_paths:
                    socket = make_zmq_socket(context, path, zmq.PUSH, linger=4000)
                    socket.send(core.ENGINE_CORE_DEAD)
                    socket.close()
            raise

    return send_or_report
