"""The results: a table for people, and JSON for programs."""

import os
import platform
import sqlite3
import time
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from bench.kit import RESULTS, Bench, Figure


def machine() -> dict[str, str]:
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return {
        "cpu": _cpu_model(),
        "cores": str(os.cpu_count()),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        "durability": "fsync (WAL, synchronous=FULL)",
        "load": load,  # of the machine when the run began
    }


def show(console: Console, bench: Bench, about: dict[str, str], took_s: float) -> None:
    table = Table(title="Onward, measured", title_justify="left", header_style="bold", row_styles=["", "dim"])
    for name in ("what", "measured", "compared with", "ratio", "target", "met"):
        table.add_column(name, justify="right" if name == "ratio" else "left", overflow="fold")
    for figure in bench.figures:
        table.add_row(*_cells(figure))
    console.print(table)
    console.print(
        f"{about['cpu']}, {about['cores']} cores, Python {about['python']}, SQLite {about['sqlite']}, "
        f"{about['system']}; durability {about['durability']}; load at start {about['load']}"
    )
    failed = [check for check in bench.checks if not check.ok]
    for check in failed:
        console.print(f"[red]FAILED[/red] {check.what}: {check.detail}")
    verdict = f"[red]{len(failed)} failed[/red]" if failed else "none failed"
    console.print(f"{len(bench.checks)} correctness checks, {verdict}; {took_s:.0f} s")


def write(bench: Bench, about: dict[str, str], took_s: float, path: Path | None) -> Path:
    if path is None:
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"{time.strftime('%Y%m%d-%H%M%S')}.json"
    content = {
        "machine": about,
        "quick": bench.quick,
        "took_s": took_s,
        "figures": bench.figures,
        "checks": bench.checks,
    }
    path.write_bytes(msgspec.json.format(msgspec.json.encode(content)) + b"\n")
    return path


def _cells(figure: Figure) -> tuple[str, ...]:
    ratio = "" if figure.ratio is None else f"{figure.ratio:.2f}x" if figure.ratio < 10 else f"{figure.ratio:.0f}x"
    met = {True: "[green]yes[/green]", False: "[red]no[/red]", None: ""}[figure.met]
    return figure.what, figure.measured, figure.beside, ratio, figure.target, met


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
