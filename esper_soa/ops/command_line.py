"""What the commands that need no Hydra share: help on one screen, and what their errors end with.

Needs no torch.
"""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from esper_soa.errors import UserError
from esper_soa.ops.console import standing_streams
from esper_soa.ops.interrupt import stopped_at_once


def parser(usage: str, purpose: str, words: str) -> argparse.ArgumentParser:
    """What reads the arguments of a command. usage: one line that begins with its name; words: what
    each argument is, shown as it stands; the arguments themselves are added with
    help=argparse.SUPPRESS.
    """
    form = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(usage.split()[0], usage, purpose, words, formatter_class=form)


@contextmanager
def ending_with_status() -> Iterator[None]:
    """The work of a command; ends the interpreter with 2 for a mistake that we found, 1 for a file
    that could not be written, each told in one line, and at once when it is asked to stop.
    """
    with standing_streams(), stopped_at_once():
        try:
            yield
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(2)
        except OSError as error:
            reason = error.strerror or error
            print(f"error: {error.filename}: cannot be written ({reason})", file=sys.stderr)
            sys.exit(1)
