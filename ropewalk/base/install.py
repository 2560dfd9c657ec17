"""How to install what is missing."""

from __future__ import annotations

from pathlib import Path


def install_command(extras: str) -> str:
    """The command that installs extras: in a clone with the versions that are tested, elsewhere beside the wheel."""
    clone = Path(__file__).parents[2]
    if (clone / "constraints.txt").exists():
        return f"pip install -e '.[{extras}]' -c constraints.txt"
    return f"pip install 'ropewalk[{extras}]'"
