#!/usr/bin/env python3
"""compare.py OLD.jsonl NEW.jsonl [--limit X] - two runs of oproj-bench side by side.

Rows meet by case, rung, model, share, ranks, backend, warm, graph and tokens, and where they sum
over ranks by communicator, push, chunk and mode; where a file has several of
one kind the last counts.  ratio = new / old, so below 1 is faster.  With --limit, exit code 1 when
a ratio of the rung oproj is above X (1.05, say)."""
import argparse
import json
import math
import sys

KEY = ("case", "rung", "model", "share", "ranks", "backend", "warm", "graph", "tokens")


def how(row):
    chunk = row.get("chunk")  # files from before there were chunks lack it
    return (row["comm"] + (", push" if row["push"] else "")
            + (f", chunks of {chunk}" if chunk else ""))


def key(row):
    reduce = row.get("reduce")  # files from before such cases lack it
    return tuple(row[k] for k in KEY) + (reduce, how(row) if reduce else None)


def read(path):
    rows = {}
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                rows[key(row)] = (row["p50_us"], row["p99_us"], row["path"], row["device"])
            except (ValueError, KeyError, TypeError) as error:
                sys.exit(f"compare.py: {path}:{number}: no row of oproj-bench ({error!r})")
    return rows


def show(old, new):
    """Prints the common rows; returns the ratios by rung."""
    ratios = {}
    print(f"{'case':9} {'model':11} {'share':>5} {'ranks':>5} {'tokens':>7} {'rung':6} "
          f"{'old p50':>10} {'new p50':>10} {'ratio':>7} {'p99':>7}  path")
    for common in [k for k in old if k in new]:
        named = dict(zip(KEY, common))
        reduce = common[len(KEY)]
        (old50, old99, old_path, _), (new50, new99, new_path, _) = old[common], new[common]
        path = new_path if old_path == new_path else f"{old_path} -> {new_path}"
        path += f", {reduce} by {common[-1]}" if reduce else ""
        ratios.setdefault(named["rung"], []).append(new50 / old50)
        print(f"{named['case']:9} {named['model'][-11:]:11} {named['share']:5} {named['ranks']:5} "
              f"{named['tokens']:7} {named['rung']:6} {old50:10.2f} {new50:10.2f} "
              f"{new50 / old50:7.3f} {new99 / old99:7.3f}  {path}")
    return ratios


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--limit", type=float)
    asked = parser.parse_args()
    old, new = read(asked.old), read(asked.new)
    devices = [sorted({row[3] for row in rows.values()}) for rows in (old, new)]
    if devices[0] != devices[1]:
        print(f"# different devices: {', '.join(devices[0])} and {', '.join(devices[1])}")
    ratios = show(old, new)
    for rung, values in ratios.items():
        mean = math.exp(sum(map(math.log, values)) / len(values))
        print(f"# {rung}: {len(values)} rows, geometric mean {mean:.3f}, worst {max(values):.3f}")
    for name, ours, theirs in (("old", old, new), ("new", new, old)):
        alone = sum(row not in theirs for row in ours)
        if alone:
            print(f"# {alone} rows only in {name}")
    if not ratios:
        sys.exit("compare.py: no row in common")
    slower = [v for v in ratios.get("oproj", []) if asked.limit and v > asked.limit]
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
