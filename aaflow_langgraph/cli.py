"""``aaflow``: begin, measure and look. The last line on stdout of a benchmark, and of what is asked with ``--json``, is one JSON
document; the rest goes to stderr.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from aaflow_langgraph.evict.base import TIES
from aaflow_langgraph.evict.policies import POLICIES


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; the exit code is 0 (1: ``check`` found something), or 2 with one line on stderr when the input is
    wrong or a server does not answer.
    """
    # Spinning OpenMP threads make a decode step up to 30 times slower when another process wants the core; torch reads
    # this once, at import. Some microseconds of it are cheaper than a sleep and a waking between two products, though.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    arguments = _parser().parse_args(argv)
    from aaflow_langgraph.errors import AAFlowError

    try:
        return _COMMANDS[arguments.command](arguments)
    except AAFlowError as error:
        sys.stderr.write(f"aaflow: {error}\n")
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="aaflow", description="KV handles for LangGraph: measure and look.")
    parser.add_argument("--version", action="version", version=f"aaflow-langgraph {version('aaflow-langgraph')}")
    commands = parser.add_subparsers(dest="command", required=True)
    bench = commands.add_parser("bench", help="measure on this machine").add_subparsers(dest="bench", required=True)
    ttft = bench.add_parser("ttft", help="time to first token: reuse against re-prefill and against the bound")
    fork = bench.add_parser("fork", help="what a fork costs in time and bytes")
    stall = bench.add_parser("stall", help="what running streams wait while a long prompt is prefilled")
    step = bench.add_parser(
        "step", help="one decode step, on an empty cache and behind contexts, against the stock modules"
    )
    index = bench.add_parser("index", help="operations of an index on Redis against a bare round trip to it")
    disk = bench.add_parser("disk", help="spill and fetch of the disk tier against plain writes and mapped reads")
    evict = bench.add_parser("evict", help="hit rates of eviction policies on traces, beside what could be hit")
    attach = bench.add_parser("attach", help="what it costs to reach KV that another process holds")
    share = bench.add_parser("share", help="what several processes of one host pay for one context")
    agents = bench.add_parser("agents", help="N agents on one context: handles beside what else could be run")
    resume = bench.add_parser("resume", help="what a restart costs a thread whose KV was kept beside its checkpoints")
    compose = bench.add_parser("compose", help="joining documents: what every rung costs and does to the answer")
    shapes = bench.add_parser("shapes", help="how much of what six kinds of message applications could reuse is reused")
    saver = bench.add_parser("saver", help="what the checkpointer costs beside the saver that it wraps")
    for command in (ttft, fork, step, stall, share, agents, resume, saver, compose, shapes):
        command.add_argument("--model", default=None, help="hub id or directory (default: the demo model)")
        command.add_argument("--dtype", default="auto", help="float32, bfloat16, float16 or auto (the checkpoint's)")
    for command in (ttft, fork, step, stall):
        command.add_argument("--device", default="auto", help="cpu, cuda, cuda:N or auto")
    ttft.add_argument(
        "--contexts", type=_counts, default=None, help="comma-separated; default 1024,4096,7777 and the longest"
    )
    ttft.add_argument("--rounds", type=_rounds, default=5, help="interleaved rounds, at least 5 (default 5)")
    fork.add_argument("--context", type=_count, default=8192, help="context tokens (default 8192, cut to the window)")
    stall.add_argument("--context", type=_count, default=2048, help="shared tokens of the streams (default 2048)")
    stall.add_argument("--prompt", type=_count, default=2048, help="tokens of the prompt that comes (default 2048)")
    stall.add_argument("--streams", type=_count, default=8, help="running streams (default 8)")
    stall.add_argument("--rounds", type=_count, default=3, help="default 3")
    step.add_argument("--contexts", type=_counts, default=None, help="comma-separated; default 1024,7777")
    step.add_argument("--rounds", type=_rounds, default=30, help="interleaved rounds, at least 5 (default 30)")
    share.add_argument("--context", type=_count, default=4096, help="shared tokens (default 4096, cut to the window)")
    share.add_argument("--workers", type=_count, default=4, help="processes (default 4)")
    share.add_argument("--rounds", type=_rounds, default=30, help="first attaches per worker, at least 5 (default 30)")
    agents.add_argument("--agents", type=_counts, nargs="+", default=[[16]], help="one or several (default 16)")
    agents.add_argument(
        "--context", type=_counts, nargs="+", default=[[4096]], help="shared tokens, cut to the window (default 4096)"
    )
    agents.add_argument("--new", type=_count, default=16, help="tokens of each question (default 16)")
    agents.add_argument("--output", type=_count, default=16, help="tokens each agent generates (default 16)")
    agents.add_argument(
        "--rounds", type=_rounds, default=5, help="of text-serial, deepcopy-batched and vllm, at least 5 (default 5)"
    )
    agents.add_argument("--slow-rounds", type=_count, default=1, help="rounds of every other side (default 1)")
    agents.add_argument(
        "--sides",
        nargs="+",
        default=None,
        metavar="SIDE",
        help="beside handles-batched; that one alone: no ratios; default all",
    )
    agents.add_argument(
        "--whole", action="store_true", help="run all agents of the sides that otherwise run some; takes long"
    )
    agents.add_argument("--svg", default=None, metavar="PATH", help="draw the result there (needs matplotlib)")
    agents.add_argument("--markdown", default=None, metavar="PATH", help="write the tables there")
    resume.add_argument("--context", type=_count, default=4096, help="kept tokens (default 4096, cut to the window)")
    resume.add_argument("--rounds", type=_count, default=5, help="restarts (default 5)")
    shapes.add_argument("--turns", type=_count, default=10, help="of every application (default 10)")
    shapes.add_argument("--output", type=_count, default=8, help="most tokens of an answer (default 8)")
    compose.add_argument(
        "--tokens", type=_count, default=4096, help="of the composite whose cost is measured (default 4096)"
    )
    compose.add_argument("--rounds", type=_rounds, default=5, help="of the cost, interleaved, at least 5 (default 5)")
    compose.add_argument("--questions", type=_count, default=6, help="of the permutation workload (default 6)")
    compose.add_argument("--orders", type=_count, default=10, help="of the documents of each question (default 10)")
    compose.add_argument("--k", type=_tokens, default=[0, 4, 16, 64], help="comma-separated; default 0,4,16,64")
    compose.add_argument(
        "--r", type=_shares, default=[0.0, 0.05, 0.15, 0.3, 1.0], help="comma-separated; default 0,0.05,0.15,0.3,1"
    )
    compose.add_argument("--svg", default=None, metavar="PATH", help="draw the result there (needs matplotlib)")
    saver.add_argument("--threads", type=_count, default=1000, help="threads in the database (default 1000)")
    index.add_argument("--index", default=None, metavar="URL", help="default: a private server for this run")
    index.add_argument("--rounds", type=_rounds, default=500, help="interleaved rounds, at least 5 (default 500)")
    attach.add_argument("--mib", type=_count, default=256, help="size of the pool (default 256)")
    attach.add_argument("--rounds", type=_rounds, default=200, help="attaches, at least 5 (default 200)")
    disk.add_argument(
        "--bytes",
        type=_count,
        default=128 << 20,
        help="bytes moved per leg and round (default 134217728), 1 MiB or more",
    )
    for command in (disk, resume, saver):
        command.add_argument("--directory", default=None, help="measured below it (default: the cache directory)")
    evict.add_argument(
        "--trace", nargs="+", action="extend", required=True, metavar="FILE", help="Mooncake or kv-cache-tester traces"
    )
    evict.add_argument("--policy", nargs="+", choices=list(POLICIES), default=list(POLICIES), help="default all")
    evict.add_argument(
        "--blocks", type=_counts, default=None, help="pool sizes, comma-separated; default 1000,2500,5000,10000,20000"
    )
    evict.add_argument(
        "--ties", nargs="+", choices=list(TIES), default=["oldest"], help="which of equals goes first (default oldest)"
    )
    _add_inspection(commands)
    lint = commands.add_parser(
        "lint", help="what keeps the prompts of an app from being append-only; exit status 1 with findings"
    )
    lint.add_argument("app", metavar="APP", help="module.py:graph or package.module:graph")
    lint.add_argument(
        "--input", default=None, metavar="JSON", help="one input of the graph, or a list of them, one a turn"
    )
    lint.add_argument(
        "--answer", action="append", default=[], metavar="TEXT", help="what its models say, in turn; may be repeated"
    )
    lint.add_argument(
        "--ignore", action="append", default=[], metavar="CAUSE", help="a cause that is meant to be; may be repeated"
    )
    lint.add_argument("--json", action="store_true", help="one JSON document")
    studio = commands.add_parser("studio", help="the inspector page, for this machine, over what others left or share")
    studio.add_argument("--index", default="memory://", metavar="URL", help="as passed to KVBroker.open")
    studio.add_argument("--disk", default=None, metavar="DIR", help="as passed to KVBroker.open")
    studio.add_argument(
        "--checkpoints", default=None, metavar="PATH", help="as passed to KVCheckpointSaver.local, or its directory="
    )
    studio.add_argument("--model", default=None, help="hub id or directory: show text, too, not only token ids")
    studio.add_argument("--host", default="127.0.0.1", help="an address of this machine alone (default 127.0.0.1)")
    studio.add_argument("--port", type=_count, default=8155, help="default 8155")
    studio.add_argument("--metadata-only", action="store_true", help="send no token ids and no text to the page")
    new = commands.add_parser("new", help="write a project that langgraph dev runs, with KV handles in its state")
    new.add_argument("directory", metavar="DIR", type=_named, help="a directory that is new or empty")
    return parser


def _add_inspection(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    inspect = commands.add_parser("inspect", help="what is there now: owners, extents by tier, leases, files")
    check = commands.add_parser(
        "check", help="every invariant over index, pools and files; exit status 1 with findings"
    )
    gc = commands.add_parser("gc", help="what nobody uses any more; removed only with --apply")
    for command in (inspect, check, gc):
        command.add_argument("--index", default="memory://", metavar="URL", help="as passed to KVBroker.open")
        command.add_argument("--disk", default=None, metavar="DIR", help="as passed to KVBroker.open")
    form = inspect.add_mutually_exclusive_group()
    for name, words in (
        ("json", "one JSON document"),
        ("watch", "live, until Ctrl-C"),
        ("prometheus", "metrics in Prometheus' text format"),
    ):
        form.add_argument(f"--{name}", dest="form", action="store_const", const=name, default="table", help=words)
    for command in (check, gc):
        command.add_argument(
            "--checkpoints",
            default=None,
            metavar="PATH",
            help="as passed to KVCheckpointSaver.local, or its directory=",
        )
    check.add_argument("--payloads", action="store_true", help="read all KV and compare it with its checksums")
    gc.add_argument("--run-dir", action="store_true", help="also sockets and memory files of processes that are gone")
    gc.add_argument("--quarantine", action="store_true", help="also damaged files that were kept for a look")
    gc.add_argument("--apply", action="store_true", help="remove it (default: say what would be removed)")
    history = commands.add_parser("history", help="the checkpoints of a thread and the KV they stand on")
    history.add_argument("thread", help="its thread_id")
    history.add_argument("what", nargs="*", metavar="diff A B", help="where two of its checkpoints part")
    history.add_argument(
        "--checkpoints", required=True, metavar="PATH", help="as passed to KVCheckpointSaver.local, or its directory="
    )
    history.add_argument("--model", default=None, help="hub id or directory: show text, too, not only token ids")
    for command in (check, gc, history):
        command.add_argument("--json", action="store_true", help="one JSON document")


def _studio(arguments: argparse.Namespace) -> int:
    from importlib.util import find_spec

    from aaflow_langgraph.errors import ConfigError

    if missing := [name for name in ("starlette", "uvicorn") if find_spec(name) is None]:
        raise ConfigError(f"the inspector needs {' and '.join(missing)}: pip install 'aaflow-langgraph[studio]'")
    from aaflow_langgraph.studio.serve import serve

    return serve(
        arguments.index,
        arguments.disk,
        arguments.checkpoints,
        model=arguments.model,
        host=arguments.host,
        port=arguments.port,
        metadata_only=arguments.metadata_only,
    )


def _new(arguments: argparse.Namespace) -> int:
    from aaflow_langgraph.project import write_project

    folder = Path(arguments.directory)
    for path in write_project(folder):
        sys.stderr.write(f"wrote {path}\n")
    sys.stdout.write(f"cd {shlex.quote(str(folder))}\nlanggraph dev\n")
    return 0


def _inspect(arguments: argparse.Namespace) -> int:
    from aaflow_langgraph.inspection import commands

    return commands.inspect(arguments.index, arguments.disk, arguments.form)


def _check(arguments: argparse.Namespace) -> int:
    from aaflow_langgraph.inspection import commands

    return commands.check(
        arguments.index, arguments.disk, arguments.checkpoints, payloads=arguments.payloads, as_json=arguments.json
    )


def _gc(arguments: argparse.Namespace) -> int:
    from aaflow_langgraph.inspection import commands

    return commands.gc(
        arguments.index,
        arguments.disk,
        arguments.checkpoints,
        apply=arguments.apply,
        quarantine=arguments.quarantine,
        run_dir=arguments.run_dir,
        as_json=arguments.json,
    )


def _lint(arguments: argparse.Namespace) -> int:
    from aaflow_langgraph.lint import command

    return command.lint(arguments.app, arguments.input, arguments.answer, arguments.ignore, as_json=arguments.json)


def _history(arguments: argparse.Namespace) -> int:
    from aaflow_langgraph.inspection import commands

    return commands.history(
        arguments.thread, arguments.what, arguments.checkpoints, arguments.model, as_json=arguments.json
    )


def _bench_evict(arguments: argparse.Namespace) -> int:
    from aaflow_langgraph.bench import evict, traces

    trace = traces.read(arguments.trace)
    evict.report(evict.run(trace, arguments.policy, arguments.blocks or evict.BLOCKS, arguments.ties))
    return 0


def _bench_index(arguments: argparse.Namespace) -> int:
    from aaflow_langgraph.bench import index

    index.report(index.run(arguments.index, arguments.rounds))
    return 0


def _bench_attach(arguments: argparse.Namespace) -> int:
    from aaflow_langgraph.bench import attach

    attach.report(attach.run(arguments.mib, arguments.rounds))
    return 0


def _bench_disk(arguments: argparse.Namespace) -> int:
    from aaflow_langgraph.bench import disk

    disk.report(disk.run(arguments.bytes, arguments.directory))
    return 0


def _bench_agents(arguments: argparse.Namespace, versions: dict[str, str]) -> int:
    from aaflow_langgraph.assets import demo_model
    from aaflow_langgraph.bench import agents, agents_plot, agents_report, compose_plot, lineup
    from aaflow_langgraph.engine.transformers import TransformersEngine
    from aaflow_langgraph.errors import ConfigError

    names = arguments.sides or lineup.NAMES
    if unknown := [name for name in names if name not in lineup.NAMES]:
        raise ConfigError(f"there is no side {unknown[0]!r}; there are {', '.join(lineup.NAMES)}")
    picture = Path(arguments.svg) if arguments.svg else None
    if picture:
        compose_plot.check_plot(picture)
    page = Path(arguments.markdown) if arguments.markdown else None
    if page:
        compose_plot.check_output("--markdown", page)
    engine = TransformersEngine.load(arguments.model or demo_model(), dtype=arguments.dtype, device="cpu")
    document = agents.run(
        engine,
        [count for some in arguments.agents for count in some],
        [tokens for some in arguments.context for tokens in some],
        arguments.new,
        arguments.output,
        arguments.rounds,
        arguments.slow_rounds,
        names,
        whole=arguments.whole,
    )
    model = engine.namespace
    # First what took long to measure, then files, which may fail.
    agents_report.report(
        document,
        {
            "model": model.model,
            "dtype": model.dtype,
            "read_path": engine.read_path,
            "attention": engine.attention,
            "versions": versions,
        },
    )
    try:
        if picture:
            agents_plot.draw(document, picture)
        if page:
            agents_report.write_markdown(document, page)
    except OSError as error:
        raise ConfigError(f"{error.strerror}: {error.filename or page or picture}; the result stands above") from error
    return 0


def _bench_compose(arguments: argparse.Namespace, versions: dict[str, str]) -> int:
    from aaflow_langgraph import assets
    from aaflow_langgraph.bench import compose, compose_plot
    from aaflow_langgraph.engine.transformers import TransformersEngine

    picture = Path(arguments.svg) if arguments.svg else None
    if picture:
        compose_plot.check_plot(picture)
    folder = assets.factbook()
    engine = TransformersEngine.load(arguments.model or assets.demo_model(), dtype=arguments.dtype, device="cpu")
    document, seen = compose.run(
        engine,
        folder,
        tokens=arguments.tokens,
        rounds=arguments.rounds,
        questions=arguments.questions,
        orders=arguments.orders,
        ks=arguments.k,
        rs=arguments.r,
    )
    if picture:
        compose_plot.draw(document, seen, picture)
    compose.report(document, engine, versions)
    return 0


def _bench(arguments: argparse.Namespace) -> int:
    if arguments.bench == "evict":  # needs no model
        return _bench_evict(arguments)
    if arguments.bench == "index":
        return _bench_index(arguments)
    if arguments.bench == "attach":
        return _bench_attach(arguments)
    if arguments.bench == "disk":
        return _bench_disk(arguments)
    import torch
    import transformers

    from aaflow_langgraph.assets import demo_model
    from aaflow_langgraph.bench import fork, resume, saver, shapes, share, stall, step, ttft
    from aaflow_langgraph.engine.transformers import TransformersEngine

    if arguments.bench == "share":  # its processes load the model
        source = str(arguments.model or demo_model())
        share.report(share.run(source, arguments.dtype, arguments.workers, arguments.context, arguments.rounds))
        return 0
    if arguments.bench == "shapes":
        source = str(arguments.model or demo_model())
        shapes.report(shapes.run(source, arguments.dtype, arguments.turns, arguments.output))
        return 0
    versions = {
        "aaflow-langgraph": version("aaflow-langgraph"),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    if arguments.bench == "agents":
        return _bench_agents(arguments, versions)
    if arguments.bench == "compose":
        return _bench_compose(arguments, versions)
    if arguments.bench == "resume":
        source = str(arguments.model or demo_model())
        resume.report(resume.run(source, arguments.dtype, arguments.context, arguments.rounds, arguments.directory))
        return 0
    device = "cpu" if arguments.bench == "saver" else arguments.device
    engine = TransformersEngine.load(arguments.model or demo_model(), dtype=arguments.dtype, device=device)
    if arguments.bench == "saver":
        saver.report(saver.run(engine, arguments.threads, arguments.directory))
        return 0
    if arguments.bench == "stall":
        asked = (arguments.context, arguments.prompt, arguments.streams, arguments.rounds)
        stall.report(stall.run(engine, *asked))
        return 0
    if arguments.bench == "fork":
        fork.report(fork.run(engine, arguments.context))
        return 0
    if arguments.bench == "step":
        step.report(step.run(engine, arguments.contexts, arguments.rounds), engine, arguments.rounds, versions)
        return 0
    ttft.report(ttft.run(engine, arguments.contexts, arguments.rounds), engine, arguments.rounds, versions)
    return 0


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def _counts(text: str) -> list[int]:
    return [_count(part.strip()) for part in text.split(",")]


def _tokens(text: str) -> list[int]:
    if not all(part.strip().isdecimal() for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers of tokens, like 0,16")
    return [int(part) for part in text.split(",")]


def _shares(text: str) -> list[float]:
    try:
        shares = [float(part) for part in text.split(",")]
    except ValueError:
        shares = [-1.0]
    if not all(0 <= share <= 1 for share in shares):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of shares between 0 and 1, like 0.05,0.15")
    return shares


def _named(text: str) -> str:
    if not text:  # pathlib would read it as the current directory
        raise argparse.ArgumentTypeError("it is empty; name a directory, or . for this one")
    return text


def _rounds(text: str) -> int:
    if _count(text) < 5:
        raise argparse.ArgumentTypeError(
            "a median of fewer than 5 rounds says little on a noisy machine; pass at least 5"
        )
    return int(text)


_COMMANDS = {
    "bench": _bench,
    "inspect": _inspect,
    "check": _check,
    "gc": _gc,
    "history": _history,
    "lint": _lint,
    "new": _new,
    "studio": _studio,
}
