"""``aaflow inspect``, ``check``, ``gc`` and ``history``: from their options to what is printed and the exit status.

With ``--json`` stdout is one JSON document; else it is for people.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Literal

from rich.console import Console
from rich.live import Live

from aaflow_langgraph.checkpoint.beside import Beside
from aaflow_langgraph.errors import ConfigError
from aaflow_langgraph.inspection.table import printable, size, tables
from aaflow_langgraph.inspection.view import MEMORY, Outside, document

Form = Literal["table", "json", "watch", "prometheus"]
WATCH_S = 1.0
SHOWN = 50
"""Lines of a kind that people are shown."""
_WIDEST = 1 << 16


def inspect(index: str, disk: str | None, form: Form) -> int:
    """Show what is there; with ``watch`` until Ctrl-C."""
    with Outside(index, disk) as outside:
        if form == "json":
            _print_json(document(outside.look()))
        elif form == "prometheus":
            from aaflow_langgraph.metrics import prometheus_from_outside

            sys.stdout.write(prometheus_from_outside(document(outside.look())))
        elif form == "watch":
            _watch(outside)
        else:
            _console().print(tables(outside.look()))
    return 0


def check(index: str, disk: str | None, checkpoints: str | None, *, payloads: bool, as_json: bool) -> int:
    """Check; 0 when nothing was found, else 1."""
    from aaflow_langgraph.inspection.check import check

    with ExitStack() as stack:
        beside = None if checkpoints is None else stack.enter_context(Beside(checkpoints))
        outsides = [] if beside is not None and (index, disk) == (MEMORY, None) else [Outside(index, disk)]
        outsides += _tensors(beside)
        checked = check([stack.enter_context(one) for one in outsides], beside=beside, payloads=payloads)
    if as_json:
        _print_json(checked.document())
    else:
        _print_some([f"{found.invariant}  {found.where}: {found.what}" for found in checked.findings])
        _print_some([f"in transition  {found.where}: {found.what}" for found in checked.in_transition])
        for note in checked.notes:
            _print(f"note  {note}")
        _print(
            f"{len(checked.findings)} findings, {len(checked.in_transition)} in transition; looked at "
            f"{checked.num_extents} extents and {checked.num_files} files"
        )
    return 1 if checked.findings else 0


def gc(
    index: str,
    disk: str | None,
    checkpoints: str | None,
    *,
    apply: bool,
    quarantine: bool,
    run_dir: bool,
    as_json: bool,
) -> int:
    """Say what would be removed, or remove it."""
    from aaflow_langgraph.inspection.clean import clean

    with ExitStack() as stack:
        beside = None if checkpoints is None else stack.enter_context(Beside(checkpoints))
        outsides = [] if (index, disk) == (MEMORY, None) else [Outside(index, disk)]
        opened = [stack.enter_context(one) for one in (*outsides, *_tensors(beside))]
        cleaned = clean(opened, beside=beside, apply=apply, quarantine=quarantine, run_dir=run_dir)
    if as_json:
        _print_json(cleaned.document())
        return 0
    for step in cleaned.removed:
        _print(f"{'removed' if apply else 'would remove'}  {step.what} ({size(step.num_bytes)})")
    num_bytes = sum(step.num_bytes for step in cleaned.removed)
    end = "" if apply or not cleaned.removed else "; --apply does it"
    _print(f"{len(cleaned.removed)} things, {size(num_bytes)}{end}")
    return 0


def history(thread_id: str, what: Sequence[str], checkpoints: str, model: str | None, *, as_json: bool) -> int:
    """List a thread's checkpoints, or say where two of them part."""
    from aaflow_langgraph.checkpoint.history import History
    from aaflow_langgraph.inspection import history

    if what and (len(what) != 3 or what[0] != "diff"):
        raise ConfigError(f"history takes a thread, or a thread and 'diff A B' with two checkpoints; got {list(what)}")
    with Beside(checkpoints) as beside:
        seen = History(beside, thread_id)
        differences = seen.diff(what[1], what[2]) if what else []
        listed = [] if what else seen.checkpoints()
    decode = history.tokenizer_of(model) if what and model else None
    if as_json:
        diffed = history.diff_document(thread_id, differences, decode)
        _print_json(diffed if what else history.history_document(thread_id, listed))
    elif what:
        for line in history.diff_lines(differences, decode):
            _print(line)
    else:
        _console().print(history.history_table(listed))
    return 0


def _tensors(beside: Beside | None) -> list[Outside]:
    """The files of a saver's tensors: a disk pool like any other."""
    return [] if beside is None or beside.extents is None else [Outside(MEMORY, str(beside.extents))]


def _watch(outside: Outside) -> None:
    try:
        with Live(tables(outside.look()), console=_console(), auto_refresh=False) as live:
            while True:
                time.sleep(WATCH_S)
                live.update(tables(outside.look()), refresh=True)
    except KeyboardInterrupt:
        return


def _console() -> Console:
    # A pipe or a file has no width, for which rich takes 80; a table takes no more than it needs. Names from outside are no markup.
    return Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else _WIDEST)


def _print(line: str) -> None:
    sys.stdout.write(printable(line) + "\n")


def _print_some(lines: Sequence[str]) -> None:
    for line in lines[:SHOWN]:
        _print(line)
    if len(lines) > SHOWN:
        _print(f"... and {len(lines) - SHOWN} more; --json has all of them")


def _print_json(document: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(document) + "\n")
