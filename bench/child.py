"""The child process of kit.child: imports a contestant, runs it, and prints its result as the last line."""

import sys
from importlib import import_module

import msgspec


def main(module: str, arguments: str) -> None:
    outcome = import_module(module).run(**msgspec.json.decode(arguments))
    print(msgspec.json.encode(outcome).decode(), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
