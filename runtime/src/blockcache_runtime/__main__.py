"""`python -m blockcache_runtime serve policy.onnx`: what a robot's computer runs where nothing else is installed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.util import find_spec

from blockcache_runtime.errors import BlockcacheError, EngineError
from blockcache_runtime.serve.settings import Settings, option_name, options


def main(argv: Sequence[str] | None = None) -> int:
    """Run a verb; what is refused ends as one line and exit code 2.

    Args:
        argv: The words behind the program's name; without them those it was called with.
    """
    parser = argparse.ArgumentParser(prog="python -m blockcache_runtime")
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    verb = verbs.add_parser("serve", help="serve an export to clients of openpi or vla-eval")
    verb.add_argument("policy", help="a file that 'blockcache export' wrote")
    verb.add_argument("--threads", type=int, help="cores for one generation; default: one or all, what is faster")
    for name, default, said in options():
        shape = {"action": "append", "default": []} if default == () else {"type": type(default), "default": default}
        verb.add_argument(option_name(name), help=said.pop("help"), **shape, **said)
    asked = vars(parser.parse_args(argv))
    path, threads = asked.pop("policy"), asked.pop("threads")
    try:
        check_libraries()
        settings = Settings(**{**asked, "rename": tuple(asked["rename"])})

        from blockcache_runtime.export import open_export
        from blockcache_runtime.serve.policies import ServedExport
        from blockcache_runtime.serve.server import serve

        serve(ServedExport(open_export(path, threads)), settings)
    except BlockcacheError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # before the port was open
        return 130
    return 0


def check_libraries() -> None:
    """Refuse to serve without the libraries of the extra `serve`."""
    if missing := [name for name in ("websockets", "msgpack") if find_spec(name) is None]:
        raise EngineError(f"serving needs {missing[0]}, which comes with: pip install 'blockcache-runtime[serve]'")


if __name__ == "__main__":
    sys.exit(main())
