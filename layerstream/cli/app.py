"""The commands and their options; each command's work is in a module of its own, loaded when it is asked for."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

import layerstream
from layerstream.errors import ConfigError, LayerStreamError

app = typer.Typer(
    name="layerstream",
    help="KV cache kept outside the GPU and streamed back layer by layer.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Run the command line. An error raised on purpose is one line on stderr and exit status 2, never a traceback."""
    try:
        app()
    except LayerStreamError as error:
        sys.stderr.write(f"layerstream: {' '.join(str(error).split())}\n")
        sys.exit(2)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"layerstream {layerstream.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def doctor(
    url: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="A running server, such as http://127.0.0.1:8000, to look at instead."),
    ] = None,
) -> None:
    """Say what is installed, what would be chosen on this machine, and how to mend what is wrong.

    With --url, say what the metrics of a running server tell is wrong with it.

    Exit status 1 if the connector cannot work here, or does not work on that server.
    """
    if url is not None:
        from layerstream.cli.server import run_on_server

        raise typer.Exit(run_on_server(url))
    from layerstream.cli.doctor import run

    raise typer.Exit(run())


@app.command()
def plan(
    model: Annotated[Path, typer.Argument(metavar="MODEL_OR_CONFIG", help="A model folder or a config.json.")],
    kv_dtype: Annotated[str, typer.Option(help="Type of the KV cache: auto, bf16, fp16, fp32 or fp8.")] = "auto",
    tp: Annotated[int, typer.Option(min=1, help="Tensor parallel ranks.")] = 1,
    pp: Annotated[int, typer.Option(min=1, help="Pipeline stages.")] = 1,
    tokens: Annotated[int, typer.Option(min=1, help="Length of one sequence.")] = 8192,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens in one KV block.")] = 16,
    pool_gib: Annotated[
        float | None, typer.Option(min=0.0, help="Host pool of one rank in GiB; this machine's default if not given.")
    ] = None,
    tier: Annotated[
        list[str] | None,
        typer.Option(
            metavar="JSON|NAME",
            help="A tier to try, as in the option `tiers`; may be given several times. With --gpu also where the hit "
            "is: host, disk, or a network such as 25GbE.",
        ),
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(help="Say what a hit is worth on this kind of GPU: h100, a100, ...")
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option(metavar="TOKENS", help="With --gpu: length of the prompt, such as 32k; --tokens if not given."),
    ] = None,
    hit: Annotated[
        float | None, typer.Option(help="With --gpu: part of the prompt that is kept; 0.9 if not given.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Requests of a service, one JSON object a line: what pools would have hit."),
    ] = None,
    trace_block_tokens: Annotated[int, typer.Option(min=1, help="Tokens in one block of the trace.")] = 512,
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder for the picture of --trace.")] = Path("out"),
) -> None:
    """Say how many bytes of KV cache a model keeps, and how much of it fits into the host pool and into tiers.

    With --gpu, say whether loading a part of a prompt is worth it there, how much layer by layer helps, and what limits
    it. Numbers that are assumed and not measured are marked so.

    With --tier, some objects of the model's size are written to the tier, read back and removed, and what that says
    about a sequence is printed. With --trace, the requests are served by pools of several sizes around --pool-gib, and
    what each would have hit, and saved of the prefill, is printed and drawn.
    """
    from layerstream.cli.plan import run

    run(
        model=model,
        kv_dtype=kv_dtype,
        tp=tp,
        pp=pp,
        tokens=tokens,
        block_tokens=block_size,
        pool_gib=pool_gib,
        tiers=tier or (),
        trace=trace,
        trace_block_tokens=trace_block_tokens,
        out=out,
        gpu=gpu,
        prompt=prompt,
        hit=hit,
    )


@app.command()
def demo(
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder for the timeline's trace and picture.")] = Path(
        "out"
    ),
    prompt_tokens: Annotated[int, typer.Option(min=256, help="Length of the prompt.")] = 4000,
    pairs: Annotated[int, typer.Option(min=1, help="Measured pairs of a local hit and a LayerStream hit.")] = 6,
) -> None:
    """Serve a long prompt cold and warm on the real vLLM engine, and draw the timeline of the load."""
    from layerstream.cli.demo import run

    raise typer.Exit(run(out=out, prompt_tokens=prompt_tokens, pairs=pairs))


@app.command()
def bench(
    compare: Annotated[
        tuple[Path, Path] | None, typer.Option(metavar="A.json B.json", help="Two recorded runs of `make bench`.")
    ] = None,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Measure the transfer paths of this machine's device.")
    ] = False,
    device: Annotated[
        str | None, typer.Option(help="Device to calibrate: cpu, cuda or cuda:N; the first GPU if there is one.")
    ] = None,
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder for the calibration's picture.")] = Path("out"),
) -> None:
    """Compare two recorded benchmark runs, row by row, or calibrate the transfer paths.

    Exit status 1 if a row met its target in A and misses it in B.
    """
    if calibrate == (compare is not None):
        raise ConfigError(
            "bench: say one thing to do: --compare A.json B.json (`make bench` makes such files), or --calibrate"
        )
    if compare is not None:
        from layerstream.cli.bench import run_compare

        raise typer.Exit(run_compare(*compare))
    from layerstream.cli.calibrate import run_calibration

    raise typer.Exit(run_calibration(out=out, device=device))


@app.command()
def inspect(
    path: Annotated[Path, typer.Argument(metavar="PATH", help='The folder of a disk tier, its "path".')],
    verify: Annotated[
        bool, typer.Option("--verify", help="Read everything, and compare it with its checksums.")
    ] = False,
    prune_damaged: Annotated[
        bool, typer.Option("--prune-damaged", help="Verify, and remove what is damaged or was left unfinished.")
    ] = False,
    prune_namespace: Annotated[
        str, typer.Option(metavar="HEX", help="Remove the objects of the namespace that begins with these digits.")
    ] = "",
    prune_older_than: Annotated[
        float | None, typer.Option(metavar="DAYS", min=0.0, help="Remove objects that were not used for so many days.")
    ] = None,
    prune_all: Annotated[bool, typer.Option("--prune-all", help="Remove all objects.")] = False,
) -> None:
    """Say what is in the folder of a disk tier; verify it, and remove what need not stay. It may be in use meanwhile.

    Files that are not objects of layerstream are never touched. Exit status 1 if damaged objects stay.
    """
    from layerstream.cli.inspection import Pruning, run

    pruning = Pruning(
        damaged=prune_damaged,
        namespace=prune_namespace,
        older_than_days=prune_older_than,
        everything=prune_all,
    )
    raise typer.Exit(run(path, verify=verify, pruning=pruning))
