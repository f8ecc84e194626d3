"""scaling_report.py - owns what a scaling run's results say: projections, tables, plots, report.md.

What was measured and what is projected never share a table.  A projection is one rank's chain as
one GPU ran it alone (oproj-bench forward --share n, from baselines/) plus the model of the sum
below."""
import json
import os

HERE = os.path.dirname(os.path.abspath(__file__))
BASELINE = "h200-1gpu.jsonl"
SHOWN = (1, 8, 32, 64, 128, 512, 2048, 8192)  # rows of the report's tables

# The sum over ranks: latency and bytes, as the library moves them (all-gather up to 512 KB a rank,
# owners beyond).  Fitted to ncclAllReduce between two H200s in CUDA graphs: 7.8 us at 14 KB, 8.4 at
# 229 KB, 42.6 at 7.3 MB, 119 at 29 MB, 407 at 117 MB.  Latency is taken to be the same for more
# ranks, which no measurement supports yet.
FEW_BYTES = 512 << 10
FEW_US, FEW_BYTES_PER_S = 7.2, 150e9
MANY_US, MANY_BYTES_PER_S = 23.0, 306e9
LINK_BYTES_PER_S = 397e9  # a peer copy between two H200s: the floor's, as in oproj-bench
HIDDEN = {"v4-pro": 7168, "v4-flash": 4096, "v4.1-flash": 5120}


def sum_us(size_bytes, ranks):
    if size_bytes <= FEW_BYTES:
        return FEW_US + (ranks - 1) * size_bytes / FEW_BYTES_PER_S * 1e6
    return MANY_US + 2 * (ranks - 1) / ranks * size_bytes / MANY_BYTES_PER_S * 1e6


def read_lines(path):
    if not os.path.exists(path):
        return []
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file if line.strip()]


# ---- results -------------------------------------------------------------------------------------


class Results:
    """The files of a run; layers, chains and sums are {(model, n): {tokens: row}}."""

    def __init__(self, out):
        records = read_lines(os.path.join(out, "steps.jsonl"))
        self.machine = next((r for r in records if r["kind"] == "machine"), None)
        self.steps = [r for r in records if r["kind"] == "step"]
        self.verdicts = [r for r in records if r["kind"] == "verdict"]
        self.rows = [r for r in read_lines(os.path.join(out, "bench.jsonl"))
                     if r["rung"] == "oproj"]
        self.gpu = any(r["backend"] == "cuda" for r in self.rows)
        self.layers = self.pick("layer", push=False)
        self.pushed = self.pick("layer", push=True)
        self.chains = self.pick("forward", push=False)
        self.projected = self.project()

    def pick(self, case, **wanted):
        found = {}
        for row in self.rows:
            if row["case"] == case and all(row[k] == v for k, v in wanted.items()):
                found.setdefault((row["model"], row["ranks"]), {})[row["tokens"]] = row
        return found

    def project(self):
        """For what this run has not measured on GPUs."""
        found = {}
        for row in read_lines(os.path.join(HERE, "baselines", BASELINE)):
            model, n, tokens = row["model"], row["share"], row["tokens"]
            if (row["case"], row["rung"], row["warm"], row["ranks"]) != ("forward", "oproj", False,
                                                                         1):
                continue
            if self.gpu and (model, n) in self.layers:
                continue
            size_bytes = 2 * tokens * HIDDEN[model]
            link_us = sum_us(size_bytes, n) if n > 1 else 0.0
            floor_us = max(row["floor_us"],
                           2 * (n - 1) / n * size_bytes / LINK_BYTES_PER_S * 1e6)
            found.setdefault((model, n), {})[tokens] = {
                "kind": "projection", "model": model, "ranks": n, "tokens": tokens,
                "chain_us": row["p50_us"], "sum_us": link_us, "p50_us": row["p50_us"] + link_us,
                "floor_us": floor_us, "device": row["device"], "path": row["path"]}
        return found


def models_of(series):
    return list(dict.fromkeys(model for model, _ in series))


def sizes_of(series, model):
    return sorted(n for name, n in series if name == model)


def speed_up(series, model, n, tokens):
    """Against one rank of the same series; None where that is not there."""
    one, many = series.get((model, 1), {}).get(tokens), series.get((model, n), {}).get(tokens)
    return one["p50_us"] / many["p50_us"] if one and many else None


# ---- tables --------------------------------------------------------------------------------------


def table(head, rows):
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows] + [""]


def tokens_of(series, model):
    found = sorted({t for (name, _), rows in series.items() if name == model for t in rows})
    return [t for t in found if t in SHOWN] if len(found) > len(SHOWN) else found


def number(us):
    return f"{us:.1f}" if us < 100 else f"{us:.0f}"


def cell(series, model, n, tokens):
    row = series.get((model, n), {}).get(tokens)
    if not row:
        return "-"
    text = number(row["p50_us"])
    if "p99_us" in row:
        text += f" / {number(row['p99_us'])}"
    faster = speed_up(series, model, n, tokens)
    if n > 1 and faster:
        text += f", {faster:.2f} x ({100 * faster / n:.0f} %)"
    if row["floor_us"]:
        text += f", floor {number(row['floor_us'])}"
    return text


def series_tables(series, what):
    lines = []
    for model in models_of(series):
        sizes = sizes_of(series, model)
        lines += [f"{model}, {what}:", ""]
        lines += table(["tokens", *(f"n = {n}" for n in sizes)],
                       [[str(t), *(cell(series, model, n, t) for n in sizes)]
                        for t in tokens_of(series, model)])
    return lines


def exposed_tables(results):
    """What the sum adds to the chain."""
    lines = []
    for title, series in (("", results.layers), (", pushed", results.pushed)):
        for model in models_of(series):
            sizes = [n for n in sizes_of(series, model) if (model, n) in results.chains]
            rows = []
            for t in tokens_of(series, model):
                pairs = [(series[model, n].get(t), results.chains[model, n].get(t)) for n in sizes]
                rows.append([str(t), *(number(a["p50_us"] - b["p50_us"]) if a and b else "-"
                                       for a, b in pairs)])
            if sizes:
                lines += [f"{model}, layer less forward{title}, us:", ""]
                lines += table(["tokens", *(f"n = {n}" for n in sizes)], rows)
    return lines


def sum_table(results):
    modes = [("all", False), ("all", True), ("vendor", False), ("scatter", False)]
    picked = {mode: results.pick("reduce", reduce=mode[0], push=mode[1]) for mode in modes}
    keys = sorted({key for series in picked.values() for key in series})
    head, columns = ["tokens"], []
    for model, n in keys:
        for mode in modes:
            if (model, n) in picked[mode]:
                head.append(f"{mode[0]}{', pushed' if mode[1] else ''}, n = {n}")
                columns.append(picked[mode][model, n])
    tokens = sorted({t for column in columns for t in column})
    shown = [t for t in tokens if t in SHOWN] if len(tokens) > len(SHOWN) else tokens
    if not columns:
        return []
    return ([f"The sum alone over hidden of {keys[0][0]}, p50 us:", ""] +
            table(head, [[str(t), *(number(c[t]["p50_us"]) if t in c else "-" for c in columns)]
                         for t in shown]))


def load_table(results):
    rows = [[str(r["ranks"]), f"{r['p50_us'] * 1e-6:.2f}", f"{r['p99_us'] * 1e-6:.2f}",
             f"{r['bytes'] * 1e-9:.2f}", f"{r['gb_per_s']:.2f}", r["path"]]
            for r in results.rows if r["case"] == "load"]
    head = ["n", "median, s", "longest, s", "GB", "GB/s", "how"]
    return ["Loading a checkpoint, page cache forgotten before each time:", "",
            *table(head, rows)] if rows else []


# ---- plots ---------------------------------------------------------------------------------------


def pyplot():
    """matplotlib's pyplot, or None."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "oproj"
    import matplotlib.pyplot
    return matplotlib.pyplot


def draw_over_tokens(axes, series, model, style):
    for place, n in enumerate(sizes_of(series, model)):
        rows = series[model, n]
        tokens = sorted(rows)
        axes.plot(tokens, [rows[t]["p50_us"] for t in tokens], style, color=f"C{place}",
                  label=f"n = {n}", markersize=3)
        floors = [t for t in tokens if rows[t]["floor_us"]]
        axes.plot(floors, [rows[t]["floor_us"] for t in floors], ":", color=f"C{place}")
    axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="us (dotted: floor)", title=model)
    axes.legend()


def draw_over_ranks(axes, series, model, style):
    sizes = sizes_of(series, model)
    tokens = tokens_of(series, model)
    for place, t in enumerate(tokens[:: max(1, len(tokens) // 4)]):
        held = [n for n in sizes if t in series[model, n]]
        colour, rows = f"C{place}", [series[model, n][t] for n in held]
        axes[0].plot(held, [row["p50_us"] for row in rows], style, color=colour, label=f"T = {t}")
        floors = [(n, row["floor_us"]) for n, row in zip(held, rows) if row["floor_us"]]
        if floors:
            axes[0].plot(*zip(*floors), ":", color=colour)
        faster = [(n, speed_up(series, model, n, t)) for n in held]
        faster = [(n, value) for n, value in faster if value]
        if faster:
            axes[1].plot(*zip(*faster), style, color=colour)
            axes[2].plot([n for n, _ in faster], [100 * x / n for n, x in faster], style,
                         color=colour)
    axes[1].plot(sizes, sizes, ":", color="grey")
    axes[0].set(xscale="log", yscale="log", ylabel="us (dotted: floor)", title=model)
    axes[1].set(xscale="log", yscale="log", ylabel="speed-up (dotted: n)")
    axes[1].set_yticks(sizes, [str(n) for n in sizes])
    axes[2].set(xscale="log", ylabel="efficiency, %", ylim=(0, None))
    for one in axes:
        one.set_xlabel("ranks")
        one.set_xticks(sizes, [str(n) for n in sizes])
        one.minorticks_off()
    axes[0].legend()


def draw(out, plots, name, series, style):
    """Two files for each kind of result; returns their names."""
    models = models_of(series)
    if not models:
        return []
    figure, axes = plots.subplots(1, len(models), figsize=(5 * len(models), 4), squeeze=False)
    for one, model in zip(axes[0], models):
        draw_over_tokens(one, series, model, style)
    ranked = [model for model in models if len(sizes_of(series, model)) > 1]
    names = [f"{name}-tokens.svg"]
    figure.suptitle(f"{name}: time over tokens")
    figure.tight_layout()
    figure.savefig(os.path.join(out, names[0]), metadata={"Date": None})
    if ranked:
        figure, axes = plots.subplots(len(ranked), 3, figsize=(13, 4 * len(ranked)), squeeze=False)
        for line, model in zip(axes, ranked):
            draw_over_ranks(line, series, model, style)
        names.append(f"{name}-ranks.svg")
        figure.suptitle(f"{name}: time, speed-up and efficiency over ranks")
        figure.tight_layout()
        figure.savefig(os.path.join(out, names[1]), metadata={"Date": None})
    return names


# ---- the report ----------------------------------------------------------------------------------


def machine_lines(results):
    m = results.machine
    lines = [f"* {m['host']}: {m['system']}, {m['cpu']}, {m['cpus']} CPUs, load {m['load']:.1f} "
             "at the start", *(f"* GPU {text}" for text in m["devices"]),
             f"* oproj {m['oproj']} ({m['commit']}), {m['gpu']}, {m['mpi']}",
             f"* `{m['command']}`, {m['date']}, budget {m['budget_s']:.0f} s", ""]
    if m["links"]:
        lines += ["```", *m["links"].rstrip().split("\n"), "```", ""]
    return lines


def step_lines(results):
    rows = []
    for part in dict.fromkeys(s["part"] for s in results.steps):
        steps = [s for s in results.steps if s["part"] == part]
        count = {state: sum(s["state"] == state for s in steps)
                 for state in ("passed", "failed", "left out")}
        rows.append([part, *map(str, count.values()), f"{sum(s['seconds'] for s in steps):.0f}"])
    lines = table(["part", "passed", "failed", "left out", "s"], rows)
    for verdict in results.verdicts:
        sizes = ", ".join(map(str, verdict["ranks"]))
        lines.append(f"* {verdict['name']} = {sizes}: {'yes' if verdict['passed'] else '**NO**'}")
    for step in results.steps:
        if step["state"] != "passed":
            lines.append(f"* {step['state']}: `{step['name']}` ({step['reason']}): "
                         f"`{step['command']}`")
    return [*lines, ""]


def projection_lines(results):
    if not results.projected:
        return []
    device = next(iter(next(iter(results.projected.values())).values()))["device"]
    return ["## Projected, not measured", "",
            f"For {device}s: one rank's chain, measured on one GPU alone "
            f"(bench/baselines/{BASELINE}), plus for the sum of S bytes over n ranks {FEW_US} us + "
            f"(n-1) S / {FEW_BYTES_PER_S * 1e-9:.0f} GB/s up to {FEW_BYTES >> 10} KB, beyond "
            f"{MANY_US:.0f} us + 2 (n-1)/n S / {MANY_BYTES_PER_S * 1e-9:.0f} GB/s: a fit to plain "
            "ncclAllReduce between two H200s, with the same latency assumed for more. p50 us, "
            "speed-up (efficiency), floor.", "",
            *series_tables(results.projected, "projected")]


def measured_lines(results):
    lines = ["## Measured", ""]
    if not results.gpu:
        lines += ["On CPU ranks, which share the CPUs: these times say that it runs and are "
                  "nobody's result.", ""]
    lines += ["p50 / p99 us per call over replays, the slowest rank's; speed-up (efficiency); "
              "floor.", "", *series_tables(results.layers, "whole layer"),
              *series_tables(results.pushed, "whole layer, sums pushed (OPROJ_PUSH=1)")]
    return lines + exposed_tables(results) + sum_table(results) + load_table(results)


def write(out):
    """report.md, projected.jsonl and the plots of a run in `out`.  0, or 4 where there is none."""
    results = Results(out)
    if not results.machine:
        print(f"scaling: {out} holds no run (steps.jsonl)")
        return 4
    with open(os.path.join(out, "projected.jsonl"), "w", encoding="utf-8") as file:
        for rows in results.projected.values():
            file.writelines(json.dumps(row) + "\n" for row in rows.values())
    plots, names = pyplot(), []
    if plots:
        names = draw(out, plots, "measured", results.layers, "-o")
        names += draw(out, plots, "projected", results.projected, "--x")
    else:
        print("scaling: matplotlib is not installed; no plots")
    lines = ["# Scaling of oproj", "", *machine_lines(results), *step_lines(results),
             *(f"![{name}]({name})" for name in names),
             *([] if plots else ["No plots: matplotlib is not installed."]), "",
             *measured_lines(results), *projection_lines(results)]
    with open(os.path.join(out, "report.md"), "w", encoding="utf-8") as file:
        file.write("\n".join(lines))
    print(f"report: {os.path.join(out, 'report.md')}")
    return 0
