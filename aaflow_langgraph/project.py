"""What ``aaflow new`` writes: a small project for ``langgraph dev``.

Knows the files of ``templates/studio`` and the file system. Knows no model and no server, and imports neither.
"""

from __future__ import annotations

import os
from importlib.resources import files
from pathlib import Path
from string import Template

from aaflow_langgraph.errors import ConfigError

_TEMPLATE = files("aaflow_langgraph") / "templates" / "studio"
# Git and build tools obey a .gitignore wherever it lies, so the template's has another name.
_RENAMED = {"gitignore": ".gitignore"}


def write_project(folder: Path) -> tuple[Path, ...]:
    """Write a project into ``folder``, which is created, or is empty; its files, sorted. Nothing is ever overwritten.

    Raises:
        ConfigError: ``folder`` is no directory, has something in it, or cannot be written. Way out: fail; name another.
    """
    name = Path(os.path.abspath(folder)).name
    if not name or not name.isprintable():
        raise ConfigError(f"{str(folder)!r} gives the project no name that can be shown; name a new directory")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if there := sorted(entry.name for entry in folder.iterdir()):
            raise ConfigError(
                f"{folder} is not empty: {', '.join(map(repr, there[:3]))}{' ...' if len(there) > 3 else ''}; name a new "
                "directory, or empty this one"
            )
        written = []
        for source in _TEMPLATE.iterdir():
            if source.name.startswith(("_", ".")):  # what Python and editors leave
                continue
            text = source.read_text(encoding="utf-8")
            if source.name == "README.md":
                text = Template(text).substitute(name=name)
            path = folder / _RENAMED.get(source.name, source.name)
            with path.open("x", encoding="utf-8") as target:
                target.write(text)
            written.append(path)
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"{folder} cannot be written: {error}; name a directory that can be created, or that is empty and yours"
        ) from error
    return tuple(sorted(written))
