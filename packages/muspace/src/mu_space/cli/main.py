# SPDX-License-Identifier: Apache-2.0
"""Entry point of ``mu-space``: needs the standard library only, so that it starts where everything else is broken."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

from mu_space import __version__

#: Command → (module that has ``add_arguments(parser)`` and ``main(args) -> int``, one line of help).
COMMANDS: Final[dict[str, tuple[str, str]]] = {
    "env": ("mu_space.cli.env", "what is installed, which native libraries load and why the others do not"),
    "ops": ("mu_space.cli.ops", "matrix of operators, backends, dtypes and determinism"),
    "bench": ("mu_space.cli.bench", "correctness-gated speeds beside floors, peers and goals"),
    "demo": ("mu_space.demo", "six cameras fused into a bird's-eye view by a native operator"),
}
EPILOG: Final = """\
examples:
  mu-space env --json                 report for a bug ticket
  mu-space env --strict               exit 1 with the reasons if something needed here does not work
  mu-space ops                        which backend of which operator has been run, compiled or emulated
  mu-space demo --out picture         render a street, fuse it, write the picture
  mu-space bench --case tsa_base --dtype fp32 --pass fwd
"""


class UsageError(Exception):
    """A command line that parses but makes no sense; the message is the one sentence the user sees."""


class OutputError(Exception):
    """A result that could not be written; the message is the one sentence the user sees."""


class Parser(argparse.ArgumentParser):
    """Reports a wrong command line in one sentence and exits with 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")

    def _print_message(self, message: str, file: Any = None) -> None:
        (file or sys.stderr).write(message)  # argparse's own swallows the error of a full disk


def build_parser(command: str | None) -> Parser:
    """The whole parser; only ``command``'s module is imported to add its arguments."""
    parser = Parser(
        prog="mu-space",
        description="muSPACE: spatial operators, native on MUSA, CUDA, HIP and CPU.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"muspace {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="command", required=True)
    for name, (module, text) in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=text, formatter_class=argparse.RawDescriptionHelpFormatter)
        if name == command:
            implementation = importlib.import_module(module)
            subparser.description = subparser.description or text[0].upper() + text[1:] + "."
            subparser.epilog = getattr(implementation, "EPILOG", None)
            implementation.add_arguments(subparser)
            subparser.set_defaults(run=implementation.main)
    return parser


def _unknown_command(command: str) -> int:
    known = ", ".join(COMMANDS)
    print(f"mu-space: unknown command {command!r}, expected one of {known} (see mu-space --help)", file=sys.stderr)
    return 2


def _run(command: str | None, arguments: Sequence[str]) -> int:
    try:
        args: Any = build_parser(command).parse_args(arguments)
        return int(args.run(args) or 0)
    finally:
        sys.stdout.flush()  # here a full disk or a closed pipe can still be told from success; at exit it cannot


def _silence_stdout() -> None:
    """What is left in the buffer must not be written, and fail, once more at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _prepare_streams() -> str | None:
    """Makes both streams safe to print to; one sentence if there is no standard output."""
    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115 - it lives as long as the process
    if sys.stdout is None:
        return "the standard output is closed"
    if isinstance(sys.stdout, io.TextIOWrapper):  # a path or a name that the terminal's encoding lacks is shown escaped
        sys.stdout.reconfigure(errors="backslashreplace")
    return None


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status: 0 done, 1 failed, 2 wrong command line."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = next((argument for argument in arguments if not argument.startswith("-")), None)
    name = "mu-space" if command is None else f"mu-space {command}"
    refused = _prepare_streams()
    if refused is not None:
        print(f"mu-space: {refused}", file=sys.stderr)
        return 1
    if command is not None and command not in COMMANDS:
        return _unknown_command(command)
    if not arguments:
        build_parser(None).print_help(sys.stderr)
        return 2
    try:
        return _run(command, arguments)
    except UsageError as error:
        print(f"{name}: {error} (see {name} --help)", file=sys.stderr)
        return 2
    except ImportError as error:  # torch, or a wheel: the sentence says which
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except OutputError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # `mu-space ops | head` is not an error
        _silence_stdout()
        return 0
    except OSError as error:
        if error.filename is not None:  # not the standard output's, and no command lets a file's error through
            raise
        _silence_stdout()
        print(f"{name}: the standard output could not be written: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
