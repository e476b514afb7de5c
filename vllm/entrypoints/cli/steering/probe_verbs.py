# SPDX-License-Identifier: Apache-2.0
"""The verbs of `vllm steering probe`: a thin layer on `vllm.pilot.probes`."""

import argparse
import shlex
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm.entrypoints.cli.steering import probe_options, train
from vllm.entrypoints.cli.steering.verbs import add_verb

if typing.TYPE_CHECKING:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

NO_BETTER, COULD_NOT_RUN = 1, 2
"""The exit statuses where a probe is no better than chance, and where it could not run."""

VERBS = {
    "train": "Fit a probe on labelled texts, and judge it on others.",
    "calibrate": "Find the threshold of a wanted rate of false positives.",
    "evaluate": "Judge a probe on labelled texts.",
    "import": "Write what torch saved as a probe's file.",
}
"""One line for each verb."""

_STATUS = """Over an engine that is started as `vllm serve` would, or over a running server (--url).
Exit status 1 when it is no better than chance, 2 when it could not run."""


def add_verbs(verbs: "argparse._SubParsersAction[FlexibleArgumentParser]") -> None:
    """Add the parser of `vllm steering probe`, and those of its verbs."""
    from vllm.entrypoints.cli.steering.early import VERBS as STEERING

    told = STEERING["steering"]["probe"]
    probe = verbs.add_parser(
        "probe", help=told, usage=f"vllm steering probe {{{','.join(VERBS)}}} ..."
    )
    own = probe.add_subparsers(required=True, dest="probe_verb")
    for verb, (options, usage) in {
        "train": (probe_options.train_options, "--data FILE --sites SITES --out FOLDER"),
        "calibrate": (
            probe_options.calibrate_options,
            "--probe FILE --data FILE --fpr RATE --out FILE",
        ),
        "evaluate": (probe_options.evaluate_options, "--probe FILE --data FILE"),
    }.items():
        add_verb(
            own,
            f"steering probe {verb}",
            options,
            help=VERBS[verb],
            description=f"{VERBS[verb]} {_STATUS}",
            usage=f"vllm steering probe {verb} MODEL {usage} [options] [serve options]",
        )
    imported = own.add_parser(
        "import",
        help=VERBS["import"],
        description=f"{VERBS['import']} It is read without running anything of it. scikit-learn's "
        "classifiers are pickles, which run code: vllm.v1.probes.files.probe_from_sklearn takes "
        "them in Python.",
        usage="vllm steering probe import STATE.pt OUT.safetensors --sites SITES [options]",
    )
    probe_options.import_options(imported)


def run(args: argparse.Namespace) -> int:
    """Do what the verb says; return the exit status."""
    return _RUN[args.probe_verb](args)


def _train(args: argparse.Namespace) -> int:
    from vllm.pilot.pairs import SPLITS
    from vllm.pilot.probes import LabelledData, train_probe
    from vllm.pilot.probes.judging import verdict
    from vllm.pilot.probes.pages import save_judged
    from vllm.pilot.probes.statistics import need_scipy
    from vllm.pilot.probes.training import ProbeSettings
    from vllm.pilot.report import need_folder

    folder: Path | None = None
    bench: Any = None
    try:
        # All that can be wrong without a model is found before one is loaded.
        need_scipy()
        folder = need_folder(args.out)
        data = LabelledData.read_file(args.data)
        test = LabelledData.read_file(args.test) if args.test else None
        data.split(SPLITS if test is None else SPLITS[:2])
        settings = settings_of(args)
        ProbeSettings(**settings)
        need_sites(args.sites, args.layers)
        bench = train.start_bench(args)
        layers = sorted(bench.layers) if args.layers == "all" else args.layers
        sites = args.sites or [(args.point, layer) for layer in layers]
        made = train_probe(bench, data, sites, test=test, say=_say, **settings)
        save_judged(made.probe, made.found, folder, _command(), keep=made.held)
    except train.expected_errors() as error:
        return train.could_not_run(error, args.url, folder)
    finally:
        train.end_bench(bench, args)
    return _end(made.found, verdict(made.found), folder)


def need_sites(sites: Any, layers: Any) -> None:
    """Raise ValueError where not one of the two options that say where rows are read is given."""
    if (sites is None) == (layers is None):
        raise ValueError("--sites: name them, or --layers of one --point, and not both")


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of a training; a head named for its pool is a linear one with that pool.

    Raises:
        ValueError: such a head has another pool, too.
    """
    head, pool = args.head, args.pool
    if head not in ("linear", "mlp"):
        if pool is not None:
            raise ValueError(
                f"--pool: --head {head} is a linear head with its own pool; leave it out"
            )
        head, pool = "linear", probe_options.pool_of(head)
    more = {"pool": pool, "over": args.over, "score": args.score}
    return {
        "head": head,
        "heads": args.heads,
        "units": args.units,
        "activation": args.activation,
        "penalty": args.penalty,
        "seed": args.seed or 0,
        "memory": int(args.memory * (1 << 30)),
        **{name: value for name, value in more.items() if value is not None},
    }


def _calibrate(args: argparse.Namespace) -> int:
    from vllm.pilot.probes import LabelledData, calibrate_probe
    from vllm.pilot.probes.calibration import need_enough
    from vllm.pilot.probes.statistics import need_scipy
    from vllm.v1.probes.files import load_probe, save_probe

    bench: Any = None
    try:
        need_scipy()
        probe = load_probe(args.probe)
        data = LabelledData.read_file(args.data, unlabelled=False)
        need_enough(data, args.fpr)
        need_new(Path(args.out))
        bench = train.start_bench(args)
        asked = {"over": args.over, "score": args.score, "say": _say}
        found = calibrate_probe(bench, probe, data, args.fpr, **asked)
        save_probe(found.probe, args.out)
    except train.expected_errors() as error:
        return train.could_not_run(error, args.url, None)
    finally:
        train.end_bench(bench, args)
    _say(f"{found}\n{args.out}")
    return 0


def _evaluate(args: argparse.Namespace) -> int:
    from vllm.pilot.probes import LabelledData, evaluate_probe
    from vllm.pilot.probes.judging import verdict
    from vllm.pilot.probes.pages import save_judged
    from vllm.pilot.probes.statistics import need_scipy
    from vllm.pilot.report import need_folder
    from vllm.v1.probes.files import load_probe

    folder: Path | None = None
    bench: Any = None
    try:
        need_scipy()
        folder = need_folder(args.out) if args.out else None
        probe = load_probe(args.probe)
        data = LabelledData.read_file(args.data)
        data.need_both()
        bench = train.start_bench(args)
        asked = {"over": args.over, "score": args.score, "say": _say}
        found = evaluate_probe(bench, probe, data, **asked)
        if folder is not None:
            save_judged(probe, found, folder, _command())
    except train.expected_errors() as error:
        return train.could_not_run(error, args.url, folder)
    finally:
        train.end_bench(bench, args)
    return _end(found, verdict(found), folder)


def _import(args: argparse.Namespace) -> int:
    from vllm.v1.probes.files import probe_from_torch, save_probe

    try:
        need_no_pickle(args.source)
        need_new(args.out)
        more = {} if args.pool is None else {"pool": args.pool}
        about = {"imported": {"file": args.source.name}}
        probe = probe_from_torch(
            args.source,
            args.sites,
            args.activation,
            threshold=args.threshold,
            about=about,
            **more,
        )
        save_probe(probe, args.out)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return COULD_NOT_RUN
    _say(f"{args.out}: {probe!r}")
    return 0


def need_new(path: Path) -> None:
    """Raise ValueError where a file that is to be written is there."""
    if path.exists():
        raise ValueError(f"--out {path}: is there already; name a new file")


def need_no_pickle(path: Path) -> None:
    """Raise ValueError where a file is what joblib and scikit-learn write, by its name."""
    if path.suffix in (".pkl", ".pickle", ".joblib"):
        raise ValueError(
            f"{path}: a pickle runs code when it is read; of scikit-learn's classifiers "
            "vllm.v1.probes.files.probe_from_sklearn makes a probe, in Python"
        )


_RUN: dict[str, Callable[[argparse.Namespace], int]] = {
    "train": _train,
    "calibrate": _calibrate,
    "evaluate": _evaluate,
    "import": _import,
}


def _end(found: Any, said: str, folder: Path | None) -> int:
    _say(said)
    if folder is not None:
        _say(f"{folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")
    return 0 if found.held else NO_BETTER


def _say(text: str) -> None:
    print(text, flush=True)


def _command() -> str:
    return shlex.join(["vllm", *sys.argv[1:]])
