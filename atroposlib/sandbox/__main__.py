"""Show which layers hold an untrusted program on this machine: python -m atroposlib.sandbox. Exit code 1: not all."""

import sys

from atroposlib.sandbox.programs import find_tools
from atroposlib.sandbox.sandbox import probe
from atroposlib.sandbox.workers import SandboxError


def main() -> int:
    """Print one line for each layer."""
    try:
        layers = probe(find_tools())
    except SandboxError as error:
        print(error, file=sys.stderr)
        return 1
    for layer in layers:
        print(f"{'holds' if layer.holds else 'LACKS'}  {layer.name}: {layer.detail}")
    return 0 if all(layer.holds for layer in layers) else 1


if __name__ == "__main__":
    sys.exit(main())
