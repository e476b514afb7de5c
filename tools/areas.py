# SPDX-License-Identifier: Apache-2.0
"""Places of our files, and the lines of code of each place: `make diffstat`, `make lint`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from tools.assemble import overlay_files
from tools.code_lines import count
from vllm_pilot import udiff


@dataclass(frozen=True)
class Area:
    """A capability: its files, its folders (with a slash, and all that is in them), its budget.

    A commit that needs more lines than the budget shrinks another capability, or raises the number
    here and says why.
    """

    name: str
    budget: int
    """Most lines of code that it may have."""
    planned: int
    """Lines of code that it is to have when the kinds are things."""
    places: tuple[str, ...]
    core: bool = True


AREAS = (
    Area(
        "options and refusals",
        budget=517,  # models that end after a layer; bytes and places of features
        planned=260,
        places=(
            "vllm/config/capture.py",
            "vllm/config/cpu_memory.py",
            "vllm/config/early_stop.py",
            "vllm/config/intervention_refusals.py",
            "vllm/config/points.py",
            "vllm/config/steering.py",
            "vllm/engine/intervention_args.py",
        ),
    ),
    Area(
        "taps, binding, check",
        budget=656,  # models that end after a layer: what is not made, and the check of that
        planned=570,
        places=(
            "vllm/model_executor/layers/early_stop.py",
            "vllm/model_executor/layers/native_rows.py",
            "vllm/model_executor/layers/residual_taps.py",
            "vllm/model_executor/layers/row_capture.py",
            "vllm/model_executor/model_loader/early_stop.py",
            "vllm/v1/interventions/worker/check/",
            "vllm/v1/interventions/worker/layers.py",
        ),
    ),
    Area(
        "shared words",
        budget=826,  # plans of answers that go on; a rule's head and pool; layers past the last
        planned=470,
        places=("vllm/v1/interventions/",),
    ),
    Area(
        "what was meant",  # guesses in errors: house-2 knows nothing of them
        budget=152,
        planned=0,
        places=("vllm/v1/interventions/keywords.py", "vllm/v1/interventions/likely.py"),
    ),
    Area(
        "request entry, budget",
        budget=330,  # requests of models that end after a layer; the size of a plan, without copies
        planned=210,
        places=("vllm/v1/interventions/frontend/request/",),
    ),
    Area(
        "selectors",
        budget=780,
        planned=450,
        places=(
            "vllm/v1/interventions/frontend/request/chat.py",
            "vllm/v1/interventions/frontend/request/media.py",
            "vllm/v1/interventions/frontend/request/prompt.py",
            "vllm/v1/interventions/frontend/request/selectors.py",
            "vllm/v1/interventions/frontend/request/text.py",
            "vllm/v1/interventions/frontend/request/written_text.py",
        ),
    ),
    Area(
        "vectors to table",
        budget=1180,  # numbers of all sites are read at once; plans of modules are kept
        planned=800,
        places=(
            "vllm/v1/interventions/frontend/request/contents.py",
            "vllm/v1/interventions/frontend/request/memo.py",
            "vllm/v1/interventions/frontend/request/module_plans.py",
            "vllm/v1/interventions/frontend/request/segments.py",
            "vllm/v1/interventions/frontend/request/steering.py",
            "vllm/v1/interventions/scheduler/pools.py",
            "vllm/v1/interventions/scheduler/tables.py",
            "vllm/v1/interventions/vectors.py",
            "vllm/v1/interventions/worker/tables/",
        ),
    ),
    Area(
        "operations, gates",
        budget=1032,
        planned=580,
        places=(
            "vllm/model_executor/layers/steering_terms.py",
            "vllm/config/operations.py",
            "vllm/v1/interventions/low_rank.py",
            "vllm/v1/interventions/operations.py",
            "vllm/v1/interventions/terms.py",
            "vllm/v1/steering_formula.py",
            "vllm/v1/interventions/worker/tables/terms.py",
        ),
    ),
    Area(
        "running requests",  # answers that go on: house-2 knows nothing of them
        budget=345,
        planned=0,
        places=(
            "vllm/v1/interventions/frontend/control/running.py",
            "vllm/v1/interventions/frontend/request/joined.py",
            "vllm/v1/interventions/frontend/results/going_on.py",
        ),
    ),
    Area(
        "focus",
        budget=636,
        planned=590,
        places=(
            "vllm/v1/interventions/focus.py",
            "vllm/v1/interventions/frontend/request/focus.py",
            "vllm/v1/interventions/worker/focus/",
        ),
    ),
    Area(
        "modules, globals",
        budget=808,  # autoencoders are loaded before they get a name
        planned=470,
        places=(
            "vllm/v1/interventions/calls.py",
            "vllm/v1/interventions/frontend/control/",
            "vllm/v1/interventions/frontend/request/catalog.py",
            "vllm/v1/interventions/global_state.py",
            "vllm/v1/interventions/scheduler/changes.py",
            "vllm/v1/interventions/scheduler/module_sets.py",
            "vllm/v1/interventions/scheduler/state.py",
            "vllm/v1/steering/",
        ),
    ),
    Area(
        "kept rows",  # of cached blocks: house-2 knows nothing of them
        budget=222,
        planned=0,
        places=(
            "vllm/v1/interventions/scheduler/kept_rows.py",
            "vllm/v1/metrics/kept_stats.py",
        ),
    ),
    Area(
        "scheduler's frame",
        budget=649,  # turns none waits for; rows granted a step ahead; room of named autoencoders
        planned=380,
        places=("vllm/v1/interventions/scheduler/",),
    ),
    Area(
        "capture's request",
        budget=537,  # doses: what they are refused with; rows of a width of their own
        planned=360,
        places=(
            "vllm/v1/interventions/capture_groups.py",
            "vllm/v1/interventions/frontend/request/capture.py",
            "vllm/v1/interventions/frontend/request/doses.py",
            "vllm/v1/interventions/frontend/request/making_fields.py",
            "vllm/v1/interventions/frontend/request/streams.py",
        ),
    ),
    Area(
        "device side of capture",
        budget=620,
        planned=520,
        places=(
            "vllm/v1/interventions/step_rows.py",
            "vllm/v1/interventions/worker/rows/",
        ),
    ),
    Area(
        "transport",
        budget=842,
        planned=740,
        places=(
            "vllm/v1/capture/transport/",
            "vllm/v1/interventions/frontend/results/link.py",
        ),
    ),
    Area(
        "consumers",
        budget=1285,  # results of streams in three calls, made when read; keys for KV transfers
        planned=1140,
        places=(
            "vllm/v1/capture/",
            "vllm/v1/interventions/frontend/results/collector.py",
            "vllm/v1/interventions/frontend/results/gathered.py",
            "vllm/v1/interventions/frontend/results/pieces.py",
            "vllm/v1/interventions/scheduler/consumers.py",
            "vllm/v1/interventions/scheduler/relay.py",
        ),
    ),
    Area(
        "results",
        budget=494,  # answers that go on; a webhook; what `kv_transfer_params` get of results
        planned=230,
        places=("vllm/v1/interventions/frontend/results/",),
    ),
    Area(
        "heads, within branches",
        budget=290,  # routers and dense MLPs: how they are found, and proved
        planned=170,
        places=(
            "vllm/model_executor/layers/attention_taps.py",
            "vllm/v1/interventions/worker/attention/layers.py",
            "vllm/v1/interventions/worker/inner.py",
        ),
    ),
    Area(
        "attention weights",
        budget=904,
        planned=660,
        places=(
            "vllm/v1/capture/attention.py",
            "vllm/v1/capture/figures.py",
            "vllm/v1/interventions/frontend/request/attention.py",
            "vllm/v1/interventions/worker/attention/",
            "vllm/v1/interventions/worker/check/attention.py",
            "vllm/v1/interventions/worker/making/attention.py",
        ),
    ),
    Area(
        "makings",
        budget=346,  # doses; which autoencoder of a name; what ranks share and is early
        planned=150,
        places=(
            "vllm/v1/interventions/makings.py",
            "vllm/v1/interventions/worker/making/",
        ),
    ),
    Area(
        "matrices",
        budget=104,  # what is refused of rows of another width, in one place
        planned=115,
        places=(
            "vllm/v1/interventions/frontend/request/matrices.py",
            "vllm/v1/interventions/worker/tables/matrices.py",
        ),
    ),
    Area(
        "features",  # autoencoders of six makers, read and written; house-2 knows nothing of them
        budget=1210,  # held by all ranks while serving: bytes, loads, ends, places; shards
        planned=0,
        places=(
            "vllm/v1/capture/features.py",
            "vllm/v1/features/",
            "vllm/model_executor/layers/reconstruction.py",
            "vllm/v1/interventions/frontend/control/features.py",
            "vllm/v1/interventions/frontend/request/autoencoder.py",
            "vllm/v1/interventions/frontend/request/reconstruct.py",
            "vllm/v1/interventions/named_features.py",
            "vllm/v1/interventions/scheduler/feature_room.py",
            "vllm/v1/interventions/worker/making/features.py",
            "vllm/v1/interventions/worker/making/held.py",
            "vllm/v1/interventions/worker/making/placed.py",
            "vllm/v1/interventions/worker/making/shards.py",
        ),
    ),
    Area(
        "lenses",
        budget=230,
        planned=180,
        places=(
            "vllm/v1/capture/lens.py",
            "vllm/v1/interventions/frontend/request/lens.py",
            "vllm/v1/interventions/worker/check/lens.py",
            "vllm/v1/interventions/worker/making/lens.py",
        ),
    ),
    Area(
        "rules",
        budget=812,  # judged together; cuts and forcing; the webhook, not in house-2
        planned=280,
        places=(
            "vllm/v1/capture/rules.py",
            "vllm/v1/interventions/frontend/request/rules.py",
            "vllm/v1/interventions/frontend/results/judges.py",
            "vllm/v1/interventions/frontend/results/watch.py",
            "vllm/v1/interventions/frontend/results/webhook.py",
            "vllm/v1/interventions/given_rules.py",
            "vllm/v1/steering/rule_files.py",
        ),
    ),
    Area(
        "probes",  # heads, pools and files; house-2 knows nothing of them
        budget=510,
        planned=0,
        places=("vllm/v1/interventions/given_probes.py", "vllm/v1/probes/"),
    ),
    Area(
        "variants, graphs",
        budget=322,  # a step that wants what the last one did decides nothing
        planned=310,
        places=("vllm/v1/interventions/worker/variants/",),
    ),
    Area(
        "runner, start-up",
        budget=576,  # taps within branches are bound, too; models that end after a layer
        planned=290,
        places=(
            "vllm/v1/interventions/parent.py",
            "vllm/v1/interventions/start_failure.py",
            "vllm/v1/interventions/startup.py",
            "vllm/v1/interventions/worker/",
        ),
    ),
    Area(
        "metrics",
        budget=185,  # events of a webhook
        planned=120,
        places=(
            "vllm/v1/metrics/capture_stats.py",
            "vllm/v1/metrics/steering_stats.py",
        ),
    ),
    # Doors to the core, and what stands on it.
    Area(
        "server and client",
        # Widths of rows within a branch; sweeps over heads; tokens in, tokens out; trainings.
        budget=2371,
        planned=1900,
        places=("vllm/entrypoints/serve/steering/",),
        core=False,
    ),
    Area(
        "toolkit",
        budget=3987,  # data sets that load no more than they capture, and store small rows
        planned=3100,
        places=(
            "vllm/entrypoints/cli/capture/",
            "vllm/pilot/",
        ),
        core=False,
    ),
    Area(
        # Rows to trainers in other processes; house-2 knows nothing of them.
        "streams to trainers",
        budget=318,
        planned=0,
        places=("vllm/pilot/dataset/feeding.py", "vllm/pilot/dataset/trainer/"),
        core=False,
    ),
    Area(
        # Heads, statistics, labelled texts, pages and the command; house-2 knows nothing of them.
        "probes, trained",
        budget=1240,
        planned=0,
        places=(
            "vllm/entrypoints/cli/steering/probe_options.py",
            "vllm/entrypoints/cli/steering/probe_verbs.py",
            "vllm/pilot/probes/",
        ),
        core=False,
    ),
    Area(
        # Edits by gradients, and their command; house-2 knows nothing of them.
        "learning, comparing",
        budget=1090,
        planned=0,
        places=(
            "vllm/entrypoints/cli/steering/compare.py",
            "vllm/entrypoints/cli/steering/learn.py",
            "vllm/pilot/comparing.py",
            "vllm/pilot/learn/",
        ),
        core=False,
    ),
    Area(
        "commands",  # its plan knows nothing of vectors in other tools' files
        budget=1241,  # what is within branches; ends of commands that probes share; learning
        planned=1050,
        places=("vllm/entrypoints/cli/steering/",),
        core=False,
    ),
    Area(
        "compatibility",
        budget=1035,
        planned=640,
        places=(
            "vllm/config/compat.py",
            "vllm/v1/capture/lens_activations.py",
            "vllm/v1/interventions/frontend/compat/",
        ),
        core=False,
    ),
    Area(
        "files and consumers",
        budget=1900,  # features in files; rows of a byte a value; the path that answers give
        planned=1700,
        places=(
            "vllm/v1/capture/consumers/",
            "vllm/v1/capture/file_format.py",
            "vllm/v1/capture/reader.py",
            "vllm/v1/capture/shard_index.py",
            "vllm/v1/capture/small_rows.py",
            "vllm/v1/capture/stored_request.py",
            "vllm/v1/capture/table.py",
            "vllm/v1/steering/files.py",
            "vllm/v1/steering/gguf.py",
            "vllm/v1/steering/json_modules.py",
            "vllm/v1/steering/op_files.py",
            "vllm/v1/steering/reft_files.py",
            "vllm/v1/steering/startup_files.py",
            "vllm/v1/steering/unshaped.py",
        ),
        core=False,
    ),
)
"""A file belongs to the area with the longest place that it is, or is in."""


def area_of(name: str) -> Area | None:
    """The area with the longest place that `name` is, or is in; None where there is none."""
    found = [
        (len(place), number)
        for number, area in enumerate(AREAS)
        for place in area.places
        if name == place or (place.endswith("/") and name.startswith(place))
    ]
    return AREAS[max(found)[1]] if found else None


def misplaced(root: Path) -> list[str]:
    """Files of vllm/ and patches/ that are where nothing looks for them, each with its remedy."""
    places = ", ".join(sorted(place for area in AREAS for place in area.places))
    wrong = [
        f"{name} is in no area; move it to one of {places}, or give its place an area in "
        f"tools/areas.py:AREAS"
        for name in overlay_files(root)
        if area_of(name) is None
    ]
    patches = [
        str(path.relative_to(root))
        for path in sorted((root / "patches").rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    ]
    return wrong + [
        f"{name} is where nothing reads it; a seam goes into patches/seams as NAME.patch, listed "
        f"in its `series`, and the codemod's code into patches/taps as NAME.py"
        for name in patches
        if not is_patch(name)
    ]


def is_patch(name: str) -> bool:
    """Tell whether `name` is what the build reads; `series` itself says which seams are listed.

    A `.diff` is of a version beside the pinned one (tools/beside.py).
    """
    path = PurePosixPath(name)
    return name in ("patches/__init__.py", "patches/seams/series") or (
        (str(path.parent), path.suffix)
        in (("patches/seams", ".patch"), ("patches/seams", ".diff"), ("patches/taps", ".py"))
    )


def counted(root: Path) -> dict[Area, int]:
    """Lines of code of each area."""
    files: dict[Area, list[Path]] = {area: [] for area in AREAS}
    for name in overlay_files(root):
        if area := area_of(name):
            files[area].append(root / name)
    return {area: count(found) for area, found in files.items()}


def over_budget(root: Path) -> list[str]:
    """The areas that have more lines than they may have, each with its remedy."""
    return [
        f"{area.name} has {lines:,} lines of code, its budget in tools/areas.py:AREAS is "
        f"{area.budget:,}; shorten it, or raise the budget, shrink another and say why"
        for area, lines in counted(root).items()
        if lines > area.budget
    ]


def table(root: Path) -> str:
    """Lines of code by capability beside its budget and its plan: the core, the satellites, and
    what is beside them."""
    counts = counted(root)
    rows = ["lines of code (no blank lines, comments, docstrings, imports)"]
    rows.append(f"{'':25} {'now':>6} {'budget':>6} {'plan':>6}")
    for title, core in (("core", True), ("satellites", False)):
        group = {area: lines for area, lines in counts.items() if area.core is core}
        for area, lines in group.items():
            rows.append(f"  {area.name:23} {lines:6,} {area.budget:6,} {area.planned:6,}")
        budget, plan = sum(a.budget for a in group), sum(a.planned for a in group)
        rows.append(f"{title:25} {sum(group.values()):6,} {budget:6,} {plan:6,}")
    seams = udiff.series(root / "patches" / "seams")
    added = [line for p in seams for diff in p.diffs for hunk in diff.hunks for line in hunk.added]
    beside = {"seams": sum(line.strip()[:1] not in ("", "#") for line in added)}
    for folder in ("patches/taps", "tools", "tests"):
        beside[folder] = count(sorted((root / folder).rglob("*.py")))
    rows += [f"  {name:23} {lines:6,}" for name, lines in beside.items() if lines]
    rows.append(f"{'beside vllm/':25} {sum(beside.values()):6,}")
    return "\n".join(rows)
