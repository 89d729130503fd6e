"""`longctx route-sim`: what a routing policy does to the prefix caches of several replicas."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from longctx.cli.out import new_file
from longctx.errors import LongctxError
from longctx.units import parse_tokens

if TYPE_CHECKING:
    from longctx.evals.route_sim import PolicyResult, Workload


def route_sim(
    users: Annotated[int, typer.Option(help="conversations at the same time")] = 4,
    turns: Annotated[int, typer.Option(help="prompts of a conversation")] = 4,
    replicas: Annotated[str, typer.Option(metavar="N,...", help="how many replicas; several make a sweep")] = "3",
    start_tokens: Annotated[str, typer.Option(metavar="N", help="a user's first prompt")] = "500",
    turn_tokens: Annotated[str, typer.Option(metavar="N", help="what each later prompt adds")] = "200",
    shared_tokens: Annotated[str, typer.Option(metavar="N", help="a beginning that all users share")] = "0",
    load: Annotated[float, typer.Option(help="offered share of the fleet's prefill capacity; 0: one at a time")] = 0.0,
    cache_tokens: Annotated[str | None, typer.Option(metavar="N", help="tokens one replica can keep")] = None,
    prefill_rate: Annotated[float, typer.Option(help="a replica's prefill in tokens per second")] = 1000.0,
    seed: Annotated[int, typer.Option(help="of arrival times and of the random policy")] = 0,
    out: Annotated[str | None, typer.Option(metavar="FILE.png", help="draw a sweep into a new file")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object on stdout")] = False,
) -> None:
    """Simulate growing conversations over several replicas: round robin, random, least loaded and cache-aware.

    Prefill tokens, hit rate and times to first token of each policy, on the same requests at the same times.
    """
    from longctx.evals.route_sim import Workload, simulate

    counts = _counts(replicas)
    work = Workload(
        users=users,
        turns=turns,
        replicas=counts[0],
        start_tokens=parse_tokens(start_tokens, "--start-tokens"),
        turn_tokens=_tokens(turn_tokens, "--turn-tokens"),
        shared_tokens=_tokens(shared_tokens, "--shared-tokens"),
        load=load,
        cache_tokens=None if cache_tokens is None else _tokens(cache_tokens, "--cache-tokens"),
        prefill_rate=prefill_rate,
        seed=seed,
    )
    target = None if out is None else new_file(out)
    cells = [(replace(work, replicas=n), simulate(replace(work, replicas=n))) for n in counts]
    if target is not None:
        try:
            from longctx.evals.route_plot import draw_sweep
        except ModuleNotFoundError as error:
            raise LongctxError(f"--out needs {error.name}: pip install 'longctx-engine[evals]'") from error
        draw_sweep(cells, target)
    if as_json:
        reports = [_report(cell_work, results) for cell_work, results in cells]
        print(json.dumps(reports[0] if len(reports) == 1 else {"sweep": reports}))
        return
    for cell_work, results in cells:
        print(_table(cell_work, results))


def _tokens(text: str, flag: str) -> int:
    return 0 if text == "0" else parse_tokens(text, flag)


def _counts(text: str) -> list[int]:
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise LongctxError(f"--replicas takes whole numbers such as 3 or 1,2,4,8, got {text!r}") from error
    if any(n < 1 for n in counts):
        raise LongctxError(f"--replicas must be at least 1, got {text!r}")
    return counts


def _report(work: Workload, results: dict[str, PolicyResult]) -> dict[str, Any]:
    return {"policies": {name: asdict(result) for name, result in results.items()}, "config": asdict(work)}


def _table(work: Workload, results: dict[str, PolicyResult]) -> str:
    head = f"replicas {work.replicas}, users {work.users}, turns {work.turns}, load {work.load:g}"
    lines = [head, f"{'policy':<14}{'prefill tokens':>16}{'hit rate':>10}{'TTFT mean':>12}{'p95':>10}"]
    for name, r in results.items():
        lines.append(
            f"{name.replace('_', ' '):<14}{r.prefill_tokens:>16,}{r.hit_rate:>10.1%}{r.ttft_mean_s:>10.2f} s"
            f"{r.ttft_p95_s:>8.2f} s"
        )
    return "\n".join(lines)
