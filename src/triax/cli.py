"""The command line: `triax tune`, `triax cache`, `triax bench`, `triax doctor`."""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from triax.bench import command as bench
from triax.bridge.compat import jax_private, versions
from triax.bridge.errors import TriaxError
from triax.tools.tune import tune
from triax.tuning import store
from triax.version import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit status."""
    parser = _parser()
    options, words = parser.parse_known_args(arguments)
    if "words" in options and not any(word.startswith("-") for word in words):
        options.words = [*options.words, *words]
    elif words:
        parser.error(f"unrecognized arguments: {' '.join(words)}")
    options.arguments = sys.argv[1:] if arguments is None else list(arguments)
    logging.basicConfig(format="%(message)s", level=logging.INFO if options.verbose else "WARNING")
    try:
        return options.run(options)
    except TriaxError as error:
        print(f"triax: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("triax: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="triax", description="Triton kernels in JAX programs.")
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument("-v", "--verbose", action="store_true", help="log what is done")
    commands = parser.add_subparsers(required=True, metavar="command")

    command = commands.add_parser("tune", help="tune the Triton calls of a function")
    command.add_argument(
        "function", metavar="FILE:FUNCTION", help="a function without arguments that calls them"
    )
    command.set_defaults(run=_tune)

    command = commands.add_parser("cache", help="the tuned configs on disk")
    actions = command.add_subparsers(required=True, metavar="action")
    action = actions.add_parser("list", help="one line per config")
    action.set_defaults(run=_list)
    action = actions.add_parser("show", help="all that is known of configs")
    action.add_argument("name", help="a kernel, or the name that `list` shows")
    action.set_defaults(run=_show)
    action = actions.add_parser("clear", help="delete configs from the user's store")
    action.add_argument("name", nargs="?", help="a kernel, or a name; everything if left out")
    action.set_defaults(run=_clear)
    action = actions.add_parser("export", help="write the user's store into one file")
    action.add_argument("file", type=Path)
    action.set_defaults(run=_export)
    action = actions.add_parser("import", help="add the configs of an exported file")
    action.add_argument("file", type=Path)
    action.set_defaults(run=_import)

    bench.add_parser(commands)

    command = commands.add_parser("doctor", help="installed versions and what they allow")
    command.set_defaults(run=_doctor)
    return parser


def _tune(options: argparse.Namespace) -> int:
    function = _load(options.function)
    results = tune(function)
    for result in results:
        print(f"{result.kernel}: {result.config}")
        for timing in result.timings:
            time = "failed" if timing.median_ms is None else f"{timing.median_ms:10.4f} ms"
            print(f"  {time:>13}  {timing.config}" + (f"  {timing.error}" if timing.error else ""))
    if not results:
        print("nothing to tune: no Triton call with several configs ran")
    return 0


def _load(target: str) -> Any:
    path, _, name = target.rpartition(":")
    if not path or not Path(path).is_file():
        raise SystemExit(f"triax tune: {target!r} is not FILE:FUNCTION with a file that exists")
    sys.path.insert(0, str(Path(path).resolve().parent))
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise SystemExit(f"triax tune: {path} has no function {name!r}")
    return function


def _list(options: argparse.Namespace) -> int:
    for place in store.stores():
        for path, record in place.records():
            if record is None:
                print(f"{path.stem:44}  (not usable)  {place.name}")
                continue
            about = store.describe(record)
            time = "" if about["median_ms"] is None else f"{about['median_ms']:.4f} ms"
            print(f"{path.stem:44}  {time:>12}  {about['config']}  [{about['gpu']}, {place.name}]")
    return 0


def _matching(place: store.Store, name: str | None) -> list[Path]:
    return [
        path
        for path in place.paths()
        if name is None or path.stem == name or path.stem.rpartition("-")[0] == name
    ]


def _show(options: argparse.Namespace) -> int:
    paths = [path for place in store.stores() for path in _matching(place, options.name)]
    for path in paths:
        print(f"{path}\n{path.read_text()}")
    if not paths:
        print(f"triax: no tuned config named {options.name!r}", file=sys.stderr)
    return 0 if paths else 1


def _clear(options: argparse.Namespace) -> int:
    paths = _matching(store.user_store(), options.name)
    for path in paths:
        path.unlink(missing_ok=True)
    print(f"deleted {len(paths)} configs from {store.user_store().folder}")
    return 0


def _export(options: argparse.Namespace) -> int:
    place = store.user_store()
    usable = [(path, record) for path, record in place.records() if record is not None]
    with zipfile.ZipFile(options.file, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, record in usable:
            archive.writestr(path.name, record.to_json())
    print(f"wrote {len(usable)} configs to {options.file}")
    return 0


def _import(options: argparse.Namespace) -> int:
    place = store.user_store()
    added = 0
    try:
        with zipfile.ZipFile(options.file) as archive:
            for name in archive.namelist():
                try:
                    place.put(store.Record.from_json(archive.read(name).decode()))
                    added += 1
                except (ValueError, KeyError, TypeError, AttributeError) as error:
                    print(f"triax: {name} is not usable: {error}", file=sys.stderr)
    except (OSError, zipfile.BadZipFile) as error:
        print(f"triax: {options.file} cannot be read: {error}", file=sys.stderr)
        return 1
    print(f"added {added} configs to {place.folder}")
    return 0


def _doctor(options: argparse.Namespace) -> int:
    plugin = versions.cuda_plugin()
    found = {
        name: versions.installed(name) for name in ("jax", "jaxlib", "triton", "cuda-bindings")
    }
    found["CUDA plugin"] = " ".join(plugin) if plugin else None
    print(json.dumps({"triax": __version__, **found}, indent=1))
    version = versions.gated_version()
    for gate in versions.GATES:
        installed = versions.installed("triton") if gate.package == "triton" else version
        verdict = "yes" if installed and gate.passes(installed) else "no "
        print(f"  {verdict}  {gate.feature}" + ("" if verdict == "yes" else f": {gate.below}"))
    try:
        jax_private.gpu_triton()
    except TriaxError as error:
        print(f"  {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
