#!/usr/bin/env python3
"""plot.py RUN.jsonl OUT.svg [--case forward] - draws a run of oproj-bench: time over tokens.

One picture per model, one line per share (or per number of ranks, where that varies), dotted the
floor, dashed the naive composition.  Also prints, for each line, where the time falls by more than
3 % from one token count to the next, or rises by more than 15 % beyond the growth in tokens: steps
of the choice of path, not of the work.  Needs matplotlib for the picture alone."""
import argparse
import sys

import scaling_report

FALL, STEP = 0.97, 1.15


def series_of(rows, case):
    """{(model, n): {tokens: row}} and the same of the naive rung; n is share * ranks."""
    found = {"oproj": {}, "naive": {}}
    for row in rows:
        if row["case"] == case and row["rung"] in found:
            line = found[row["rung"]].setdefault((row["model"], row["share"] * row["ranks"]), {})
            line[row["tokens"]] = row
    return found["oproj"], found["naive"]


def steps(line):
    """(tokens before, tokens after, ratio of times) where the time does not grow as it should."""
    tokens = sorted(line)
    for before, after in zip(tokens, tokens[1:]):
        ratio = line[after]["p50_us"] / line[before]["p50_us"]
        if ratio < FALL or ratio > STEP * after / before:
            yield before, after, ratio


def draw(series, naive, path):
    plots = scaling_report.pyplot()
    if not plots:
        sys.exit("plot: matplotlib is not installed")
    models = scaling_report.models_of(series)
    figure, axes = plots.subplots(1, len(models), figsize=(6 * len(models), 5), squeeze=False)
    for one, model in zip(axes[0], models):
        scaling_report.draw_over_tokens(one, series, model, "-o")
        for place, n in enumerate(scaling_report.sizes_of(series, model)):
            rows = naive.get((model, n), {})
            tokens = sorted(rows)
            one.plot(tokens, [rows[t]["p50_us"] for t in tokens], "--", color=f"C{place}",
                     linewidth=0.8)
        one.set_ylabel("us (dotted: floor, dashed: naive bf16)")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("out")
    parser.add_argument("--case", default="forward")
    asked = parser.parse_args()
    series, naive = series_of(scaling_report.read_lines(asked.run), asked.case)
    if not series:
        sys.exit(f"plot: {asked.run} has no lines of the case {asked.case}")
    for (model, n), line in sorted(series.items()):
        for before, after, ratio in steps(line):
            print(f"{model}, n = {n}: {before} -> {after} tokens, time x {ratio:.2f}")
    draw(series, naive, asked.out)


if __name__ == "__main__":
    main()
