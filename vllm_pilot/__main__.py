# SPDX-License-Identifier: Apache-2.0
"""The command `vllm-pilot`: puts steering and capture into the vLLM that is installed."""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from vllm_pilot import BuildError, change, installed, payload, state

EDITED, NOT_APPLIED = "changed since", "not applied"


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="vllm-pilot", description=__doc__)
    parser.add_argument(
        "--site", type=Path, help="a folder that holds vllm/; default: where Python finds vLLM"
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser(
        "apply", help="patch the installed vLLM and add our files, all or nothing"
    )
    verb.add_argument("--untested", action="store_true", help="on a version that we did not run")
    verb = verbs.add_parser("remove", help="give the installed vLLM its own bytes back")
    verb.add_argument("--discard", action="store_true", help="give up files edited since")
    verb = verbs.add_parser("status", help="is it applied and intact? exit status 0 if so, else 1")
    verb.add_argument("--files", action="store_true", help="list the files")
    verbs.add_parser(
        "demo", add_help=False, help="get a small model, find a direction in it, steer along it"
    )
    options, rest = parser.parse_known_args(given)
    if rest and options.verb != "demo":
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    options.rest = rest
    return options


def apply(site: Path | None, untested: bool) -> str:
    """Apply our files, and return what to print.

    Raises:
        BuildError: nothing was changed; or it is a version that nobody ran, and not `untested`.
    """
    manifest = payload.read_manifest()
    one = installed.find(manifest.known, site)
    upstream = manifest.upstreams[one.public]
    if upstream.untested and not untested:
        raise BuildError(
            f"{one.name} {one.public} is patched only on demand, as {upstream.untested}: run "
            f"`vllm-pilot apply --untested`, and `vllm steering check MODEL` after it"
        )
    changed = change.apply(one.site, payload.wanted(one))
    done = "is applied" if changed else "was applied already"
    return (
        f"vllm-pilot {manifest.version} {done} to {one.name} {one.version} in {one.site}: "
        f"{len(upstream.changed)} files patched, {len(upstream.added)} added"
    )


def remove(site: Path | None, discard: bool) -> str:
    """Remove our files, and return what to print."""
    place = installed.recorded_site(site)
    if place is None:
        return "nothing is applied"
    there = [one for one in installed.find_all(place) if one.site == place]
    version = (there[0].name, there[0].public) if len(there) == 1 else None
    gone = change.remove(place, version, discard=discard)
    if not gone:
        return "nothing is applied"
    return f"{place}: {len(gone)} files are as they were before `vllm-pilot apply`"


def status(site: Path | None, files: bool) -> tuple[str, bool]:
    """Return what to print, and whether our files are applied and intact."""
    manifest = payload.read_manifest()
    place = installed.recorded_site(site)
    found = state.read(place) if place else None
    if place is None or found is None:
        one = installed.find(manifest.known, site)
        text = f"{one.name} {one.version} in {one.site}: vllm-pilot {manifest.version} is "
        return f"{text}{NOT_APPLIED}; run `vllm-pilot apply`", False
    patched = [name for name, entry in found.files.items() if entry.before]
    lines = [
        f"{found.distribution} {found.upstream} in {place}: vllm-pilot {found.version}, "
        f"{len(patched)} files patched, {len(found.files) - len(patched)} added"
    ]
    if (known := manifest.upstreams.get(found.upstream)) and known.untested:
        lines.append(f"untested: {known.untested}")
    if files:
        lines += [f"  {'M' if entry.before else 'A'} {name}" for name, entry in found.files.items()]
    wrong = []
    if found.phase is not state.Phase.APPLIED:
        wrong.append("a change was cut short: run `vllm-pilot apply`, or `vllm-pilot remove`")
    else:
        there = [(one.name, one.public) for one in installed.find_all(place) if one.site == place]
        if there != [(found.distribution, found.upstream)]:
            now = " and ".join(f"{name} {version}" for name, version in there) or "nothing"
            wrong.append(f"{now} is installed there now: run `vllm-pilot remove`")
        if found.version != manifest.version:
            wrong.append(f"this is vllm-pilot {manifest.version}: run `vllm-pilot apply`")
        wrong += [f"{EDITED}: {n} is {w}" for n, w in state.altered(place, found).items()]
    return "\n".join(lines + (wrong or ["intact"])), not wrong


def demo(options: list[str]) -> int:
    """Run the demo from a folder of its own, and return its exit status."""
    if importlib.util.find_spec("matplotlib") is None:
        raise BuildError("the demo draws a picture: pip install 'vllm-pilot[pilot]'")
    base = Path(os.environ.get("VLLM_PILOT_CACHE") or Path.home() / ".cache" / "vllm-pilot")
    folder = base / f"demo-{payload.read_manifest().version}"
    payload.extract_demo(folder)
    return subprocess.run(
        [sys.executable, "-m", "demo", *options], cwd=folder, check=False
    ).returncode


def main(given: list[str] | None = None) -> int:
    """Do what the command line says, and return the exit status."""
    options = arguments(given)
    site = options.site.resolve() if options.site else None
    try:
        match options.verb:
            case "apply":
                print(apply(site, options.untested))
            case "remove":
                print(remove(site, options.discard))
            case "status":
                text, well = status(site, options.files)
                print(text)
                return 0 if well else 1
            case _:
                return demo(options.rest)
    except (BuildError, OSError) as error:
        more = "" if isinstance(error, BuildError) else "; then run `vllm-pilot status`"
        print(f"error: {error}{more}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
