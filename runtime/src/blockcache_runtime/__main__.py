"""`python -m blockcache_runtime VERB policy.onnx`: what a robot's computer runs where nothing else is installed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from blockcache_runtime.errors import BlockcacheError, EngineError
from blockcache_runtime.serve.settings import Settings, options

PROVIDER = (
    "an execution provider of ONNX Runtime to run it with; may be repeated, in order of preference; default: the CPU"
)
TOLERANCE = "the largest difference from recorded answers that is accepted, where actions have the range -1 to 1"
FIXED = "inputs that stay as they are, such as the feature of a task's words: clients need not send them"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a verb; what is refused ends as one line and exit code 2.

    Args:
        argv: The words behind the program's name; without them those it was called with.
    """
    parser = argparse.ArgumentParser(prog="python -m blockcache_runtime")
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    server = verbs.add_parser("serve", help="serve an export to clients of openpi or vla-eval")
    for name, default, said in options():
        shape = {"action": "append", "default": []} if default == () else {"type": type(default), "default": default}
        server.add_argument(name, help=said.pop("help"), **shape, **said)
    server.add_argument("--fixed", metavar="FILE.npz", help=FIXED)
    server.set_defaults(run=_serve)
    checker = verbs.add_parser("check", help="compare an export with recorded answers of its policy; 1 if they differ")
    checker.add_argument("--reference", required=True, help="the file that 'export --with-reference' wrote beside it")
    checker.add_argument("--json", metavar="FILE", help="write the figures here")
    checker.set_defaults(run=_check)
    for verb in (server, checker):
        verb.add_argument("policy", help="a file that 'blockcache export' wrote")
        verb.add_argument("--threads", type=int, help="cores for one generation; default: one or all, what is faster")
        verb.add_argument("--provider", action="append", default=[], metavar="NAME", help=PROVIDER)
        verb.add_argument("--tolerance", type=float, default=1e-3, help=TOLERANCE)
    asked = vars(parser.parse_args(argv))
    try:
        return int(asked.pop("run")(asked.pop("policy"), asked.pop("threads"), **asked))
    except BlockcacheError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # before the port was open
        return 130


def _serve(
    path: str, threads: int | None, provider: list[str], tolerance: float, fixed: str | None, **asked: Any
) -> int:
    check_libraries()
    serve_export(path, threads, provider, tolerance, fixed, Settings(**{**asked, "rename": tuple(asked["rename"])}))
    return 0


def serve_export(
    path: str,
    threads: int | None,
    providers: Sequence[str],
    tolerance: float,
    fixed: str | None,
    settings: Settings,
) -> None:
    """Open an export, say what runs it where providers were asked for, and serve it.

    Args:
        path: The export.
        threads: See `open_export`.
        providers: See `open_export`.
        tolerance: See `open_export`.
        fixed: A file of arrays, see `open_export`.
        settings: The server's.
    """
    from blockcache_runtime.arrays import parse_arrays
    from blockcache_runtime.export import open_export
    from blockcache_runtime.files import read_bytes
    from blockcache_runtime.serve.policies import ServedExport
    from blockcache_runtime.serve.server import serve

    what = "fixed inputs"
    given = parse_arrays(read_bytes(fixed, what), what, fixed) if fixed else {}
    policy = open_export(path, threads, providers=providers, tolerance=tolerance, fixed=given)
    if policy.parity is not None:
        print(f"{path} {policy.parity}", file=sys.stderr)
    serve(ServedExport(policy), settings)


def _check(
    path: str, threads: int | None, provider: list[str], tolerance: float, reference: str, json: str | None
) -> int:
    from blockcache_runtime.export import ExportedPolicy
    from blockcache_runtime.parity import OtherPolicyError, Reference, compare

    known = Reference.load(reference)
    try:
        found = compare(ExportedPolicy(path, threads, providers=provider), known, tolerance)
    except OtherPolicyError as error:
        print(f"{path} does NOT agree: {error}")
        return 1
    if json is not None:
        found.save(json)
    print(f"{path} {found}")
    return 0 if found.agrees else 1


def check_libraries() -> None:
    """Refuse to serve without the libraries of the extra `serve`."""
    if missing := [name for name in ("websockets", "msgpack") if find_spec(name) is None]:
        raise EngineError(f"serving needs {missing[0]}, which comes with blockcache-runtime[serve] (docs/start.md)")


if __name__ == "__main__":
    sys.exit(main())
