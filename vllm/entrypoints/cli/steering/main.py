# SPDX-License-Identifier: Apache-2.0
"""The command `vllm steering`: is it right on a model, and how is a vector found?"""

import argparse
import os
import sys
import traceback
import typing
from pathlib import Path

from vllm.config.points import STREAM_POINTS
from vllm.entrypoints.cli.types import CLISubcommand

if typing.TYPE_CHECKING:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

DISAGREES, COULD_NOT_RUN = 1, 2
"""The exit statuses where the check disagrees, and where it could not run."""

CHECK = """Start the engine as `vllm serve` would, with steering and capture, and check that what is
read and written is the residual stream: identities that need no reference, and Hugging Face
transformers where the model fits in memory. Exit status 1 when anything disagrees, 2 when it could
not run."""

BENCH = """Compare ways to steer towards concepts, after AxBench: prompts, modules (vectors, LoReFT)
and operations such as features. Your judge grades each answer for concept, instruction and fluency,
and the score is the harmonic mean. Over an engine that is started as `vllm serve` would, with its
--steering-modules, or over a running server (--url). Exit status 2 when it could not run."""

TRAIN = """Find a steering vector from pairs of texts: a direction for each layer, the layer and
scale with the strongest effect that leaves ordinary text ordinary, and a report on held-out pairs.
Over an engine that is started as `vllm serve` would, or over a running server (--url). Exit status
3 when the effect is no better than that of random directions, 2 when it could not run."""


POINTS = """List the points and layers at which a model can be steered and captured, by its config:
no weights are read and no engine is started. Exit status 2 when it cannot be, with the reason."""


CONVERT = """Write a module's file from vectors of another tool (.gguf of repeng, llama.cpp and
EasySteer, .pt, .pth, .npz, .svec or .json of CAST; a folder of pyreft), or a file for
--capture-lens from a published Jacobian lens (.pt with J, source_layers, d_model). What names its
layers is taken as it is; --point is needed where the format does not say where its vectors act.
Nothing in the file is run. Exit status 2 when it is none of them, with the file and the tensor."""


class SteeringSubcommand(CLISubcommand):
    """The `steering` subcommand of the vLLM CLI."""

    name = "steering"

    @staticmethod
    def cmd(args: argparse.Namespace) -> None:
        """Run the verb and exit with its status."""
        if args.model_tag is not None:
            args.model = args.model_tag
        verbs = {
            "bench": _bench,
            "check": _check,
            "convert": _convert,
            "points": _points,
            "probe": _probe,
            "train": _train,
        }
        sys.exit(verbs[args.steering_verb](args))

    def subparser_init(
        self, subparsers: "argparse._SubParsersAction[FlexibleArgumentParser]"
    ) -> "FlexibleArgumentParser":
        """Add the parser of `vllm steering`."""
        from vllm.entrypoints.cli.steering.compare import bench_options
        from vllm.entrypoints.cli.steering.early import VERBS
        from vllm.entrypoints.cli.steering.probe_verbs import add_verbs
        from vllm.entrypoints.cli.steering.train import add_options
        from vllm.entrypoints.cli.steering.verbs import add_verb

        steering = subparsers.add_parser(
            self.name,
            help="Check steering and capture on a model, find steering vectors and probes, convert "
            "files.",
            usage="vllm steering {bench,check,convert,points,probe,train} ...",
        )
        verbs = steering.add_subparsers(required=True, dest="steering_verb")
        add_verb(
            verbs,
            "steering bench",
            bench_options,
            help=VERBS[self.name]["bench"],
            description=BENCH,
            usage="vllm steering bench MODEL --data FILE --instructions FILE --judge "
            "MODULE:FUNCTION --out FOLDER [options] [serve options]",
        )
        add_verb(
            verbs,
            "steering check",
            _check_options,
            help=VERBS[self.name]["check"],
            description=CHECK,
            usage="vllm steering check MODEL [serve options]",
        )
        convert = verbs.add_parser(
            "convert",
            help=VERBS[self.name]["convert"],
            description=CONVERT,
            usage="vllm steering convert SOURCE OUT.safetensors [--point POINT] "
            "[--layers LAYER ...] [--first-layer N]",
        )
        convert.add_argument("source", type=Path, help="The vectors or the lens as published.")
        convert.add_argument("out", type=Path, help="The file to write.")
        convert.add_argument(
            "--point",
            choices=STREAM_POINTS,
            help="Where the vectors act. Default: post_block for .gguf, .svec and .json.",
        )
        convert.add_argument(
            "--layers",
            nargs="+",
            metavar="LAYER",
            help="Numbers or ranges such as 4-7: the layers to keep, or to give the one vector of "
            "the file to. Default: all that the file has.",
        )
        convert.add_argument(
            "--first-layer",
            type=int,
            default=0,
            metavar="N",
            help="The layer of row 0 of a matrix [layers, hidden]; -1 where row 0 is the "
            "embedding, as in transformers' hidden_states and in persona vectors. Default: 0.",
        )
        convert.set_defaults(model_tag=None)
        add_verb(
            verbs,
            "steering points",
            lambda _: None,
            help=VERBS[self.name]["points"],
            description=POINTS,
            usage="vllm steering points MODEL [serve options]",
        )
        add_verbs(verbs)
        add_verb(
            verbs,
            "steering train",
            add_options,
            help=VERBS[self.name]["train"],
            description=TRAIN,
            usage="vllm steering train MODEL --data FILE --out FOLDER [options] [serve options]",
        )
        return steering


def _check_options(options: argparse._ArgumentGroup) -> None:
    options.add_argument(
        "--hf",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="Compare with Hugging Face transformers on the CPU. Default: when the weights need "
        "less than half of the free memory.",
    )
    options.add_argument(
        "--json",
        action="store_true",
        help="Print what was found once more, as the last line and in JSON: a row for the table of "
        "real checkpoints in docs/models.md.",
    )


def _check(args: argparse.Namespace) -> int:
    # The check sends functions to workers that this process starts itself.
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    from vllm.entrypoints.cli.steering.check import check_model

    try:
        return 0 if check_model(args) else DISAGREES
    except Exception:
        traceback.print_exc()
        print("verdict: could not run", flush=True)
        return COULD_NOT_RUN


def _convert(args: argparse.Namespace) -> int:
    from vllm.entrypoints.cli.steering.convert import convert_lens
    from vllm.entrypoints.cli.steering.vectors import OF_BLOCKS, convert_reft, convert_vectors

    # Of torch's files a lens says where it reads; vectors do not say where they act.
    is_torch = args.source.suffix.lower() not in (*OF_BLOCKS, ".npz")
    is_folder = args.source.is_dir()
    is_lens = is_torch and not is_folder and args.point is None and args.layers is None
    try:
        if is_folder:
            what, layers = "interventions of pyreft", convert_reft(args.source, args.out)
        elif is_lens:
            what, layers = "a Jacobian lens", convert_lens(args.source, args.out)
        else:
            asked = args.point, args.layers, args.first_layer
            what, layers = "vectors", convert_vectors(args.source, args.out, *asked)
    except (ValueError, OSError) as error:
        hint = "; vectors need --point" if is_lens and isinstance(error, ValueError) else ""
        print(f"error: {error}{hint}", file=sys.stderr, flush=True)
        return COULD_NOT_RUN
    print(f"{args.out}: {what} of layers {', '.join(map(str, layers))}", flush=True)
    return 0


def _points(args: argparse.Namespace) -> int:
    from vllm.entrypoints.cli.steering.points import list_points

    try:
        list_points(args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return COULD_NOT_RUN
    return 0


def _probe(args: argparse.Namespace) -> int:
    from vllm.entrypoints.cli.steering.probe_verbs import run

    return run(args)


def _bench(args: argparse.Namespace) -> int:
    from vllm.entrypoints.cli.steering.compare import bench_ways

    return bench_ways(args)


def _train(args: argparse.Namespace) -> int:
    from vllm.entrypoints.cli.steering.train import train_vector

    return train_vector(args)


def cmd_init() -> list[CLISubcommand]:
    """Return the subcommands of this module, for the vLLM CLI."""
    return [SteeringSubcommand()]
