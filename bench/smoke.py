#!/usr/bin/env python3
"""smoke.py - oproj-bench on the host: every case, its check, table, JSON lines and refusals.

No time is looked at, only that there is one."""
import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import unittest

ASKED = None
SMALL = ["--backend", "ref", "--model", "tiny", "-c", "-r", "2", "-w", "1"]


def run(*words, launcher=()):
    return subprocess.run([*launcher, ASKED.bench, *words], capture_output=True, text=True,
                          timeout=120, check=False)


class SmokeTest(unittest.TestCase):
    def rows(self, *words, launcher=()):
        done = run(*words, launcher=launcher)
        self.assertEqual((done.returncode, done.stderr), (0, ""), done.stdout)
        return [line.split() for line in done.stdout.splitlines() if not line.startswith("#")]

    def test_cases_sizes_and_checks(self):
        for case in ("inv_rope", "wo_a", "wo_b", "forward", "layer", "reduce"):
            with self.subTest(case=case):
                rows = self.rows(case, "-b", "1", "-e", "17", "-f", "4", *SMALL)
                self.assertEqual([row[0] for row in rows], ["1", "4", "16"])
                for row in rows:
                    self.assertGreater(float(row[1]), 0)
                    # No bandwidth, rate, floor or naive rung on the host; nothing wrong.
                    self.assertEqual(row[3:10], ["-", "-", "-", "-", "-", "-", "0"])

    def test_share_is_one_ranks_part(self):
        for model in ("v4-flash", "v4.1-flash"):
            rows = self.rows("forward", "-b", "2", "--backend", "ref", "-c", "-r", "1", "--model",
                             model, "--share", "8")
            self.assertEqual([(row[0], row[9], row[10]) for row in rows], [("2", "0", "reference")])

    def test_ranks(self):
        launcher = (ASKED.mpirun, "-n", "2")
        for words in (["forward"], ["reduce"], ["layer", "--comm", "mpi"],
                      ["layer", "--chunk", "2"], ["layer", "--reduce", "scatter", "--chunk", "1"],
                      *([case, "--reduce", mode] for case in ("reduce", "layer")
                        for mode in ("all", "vendor", "scatter"))):
            with self.subTest(words=words):
                rows = self.rows(*words, "-b", "3", *SMALL, launcher=launcher)
                self.assertEqual([(row[0], row[9]) for row in rows], [("3", "0")])

    def test_load_and_json_and_compare(self):
        with tempfile.TemporaryDirectory() as folder:
            model, lines = os.path.join(folder, "tiny"), os.path.join(folder, "a.jsonl")
            subprocess.run([ASKED.oproj, "synth", "--model", "tiny", "--out", model], check=True,
                           capture_output=True)
            ways = self.rows("load", "--dir", model, "--backend", "ref", "-J", lines, "-r", "1")
            self.assertIn("oproj_layers_load, one pass", " ".join(ways[-2]))
            self.rows("forward", "-b", "1", "-e", "2", "-J", lines, *SMALL)
            self.rows("layer", "-b", "3", "-J", lines, "--reduce", "scatter", *SMALL)
            with open(lines, encoding="utf-8") as file:
                rows = [json.loads(line) for line in file]
            rows = [r for r in rows if r["rung"] != "direct"]  # not every file system has them
            self.assertEqual([(r["case"], r["rung"], r["tokens"]) for r in rows],
                             [("load", "naive", 0), ("load", "oproj", 0), ("load", "single", 0),
                              ("forward", "oproj", 1), ("forward", "oproj", 2),
                              ("layer", "oproj", 3)])
            self.assertEqual([(r["comm"], r["reduce"]) for r in rows[-2:]],
                             [("self", None), ("self", "scatter")])
            for row in rows:
                self.assertGreater(row["p99_us"], 0)
                self.assertGreater(row["bytes"], 0)
                (self.assertIsNotNone if row["case"] == "load" else self.assertIsNone)(
                    row["gb_per_s"])
                self.assertIn("oproj-bench " + row["case"], row["command"])
            done = subprocess.run([sys.executable, ASKED.compare, lines, lines, "--limit", "1.0"],
                                  capture_output=True, text=True, check=False)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertIn("# oproj: 4 rows, geometric mean 1.000", done.stdout)

    def test_refusals(self):
        for code, words in ((2, []), (2, ["nothing"]), (2, ["forward", "-b", "0"]),
                            (2, ["forward", "-b", "8", "-e", "4"]), (2, ["forward", "-f", "1"]),
                            (2, ["forward", "-n", "x"]), (2, ["forward", "-r"]),
                            (2, ["forward", "--che"]), (2, ["forward", "--check=1"]),
                            (2, ["forward", "wo_a"]), (2, ["forward", "--model", "v5"]),
                            (2, ["forward", "--reduce", "all"]), (2, ["layer", "--comm", "tcp"]),
                            (2, ["layer", "--reduce", "none"]), (2, ["layer", "--chunk", "0"]),
                            (2, ["forward", "--chunk", "128"]), (2, ["reduce", "--chunk", "128"]),
                            (3, ["layer", "--comm", "nccl", "--model", "tiny"]),
                            (3, ["layer", "--comm", "nccl", "--backend", "ref"]),
                            (2, ["load"]), (2, ["forward", "--dir", "x"]),
                            (3, ["load", "--dir", "/nowhere", "--backend", "ref"]),
                            (3, ["forward", "--share", "3", "--backend", "ref"]),
                            (3, ["forward", "--model", "tiny", "--backend", "ref", "-J",
                                 "/nowhere/x"])):
            with self.subTest(words=words):
                done = run(*words)
                self.assertEqual((done.returncode, done.stdout), (code, ""), done.stderr)
                self.assertEqual(done.stderr.count("\n"), 1)

    def test_forced_paths(self):
        self.assertEqual(self.rows("forward", "-b", "2", "--path", "reference", *SMALL)[0][-1],
                         "reference")
        done = run("forward", "-b", "2", "--path", "decode", *SMALL)
        self.assertEqual(done.returncode, 3)
        self.assertIn("the forced path needs a GPU", done.stderr)
        done = run("wo_a", "--path", "reference", *SMALL)
        self.assertEqual(done.returncode, 2)
        self.assertIn("the case wo_a is not the whole chain", done.stderr)

    def test_ranks_are_refused_by_one_of_them(self):
        launcher = (ASKED.mpirun, "-n", "2")
        for code, word, words in ((2, "--che", ["forward", "--che"]),
                                  (3, "--share 3", ["layer", "--share", "3", "--model", "tiny"])):
            with self.subTest(words=words):
                done = run(*words, launcher=launcher)
                said = [s for s in done.stderr.splitlines() if s.startswith("oproj")]
                self.assertEqual((done.returncode, len(said)), (code, 1), done.stderr)
                self.assertIn(word, said[0])

    def test_ranks_started_differently_are_refused(self):
        done = run("layer", "-b", "1", *SMALL, ":", "-n", "1", ASKED.bench, "layer", "-b", "2", *SMALL,
                   launcher=(ASKED.mpirun, "-n", "1"))
        self.assertEqual(done.returncode, 3)
        self.assertIn('word 3 of its command line is "2" and rank 0\'s is "1"', done.stderr)

    def test_ranks_with_different_checkpoints_are_refused(self):
        with tempfile.TemporaryDirectory() as folder:
            for rank in ("0", "1"):  # under one name, as on two hosts
                os.mkdir(os.path.join(folder, rank))
                subprocess.run([ASKED.oproj, "synth", "--model", "tiny", "--seed", rank, "--out",
                                os.path.join(folder, rank, "model")], check=True,
                               capture_output=True)
            elsewhere = f'cd {folder}/$OMPI_COMM_WORLD_RANK; exec "$@"'
            done = run("load", "--dir", "model", "--backend", "ref", "-r", "1",
                       launcher=(ASKED.mpirun, "-n", "2", "sh", "-c", elsewhere, "sh"))
            self.assertEqual((done.returncode, done.stdout), (3, ""))
            self.assertIn("the checkpoint's tensors must be the same on all ranks", done.stderr)

    def test_rows_are_whole_or_not_there(self):
        with tempfile.TemporaryDirectory() as folder:
            lines = os.path.join(folder, "a.jsonl")
            done = subprocess.run(
                ["sh", "-c", 'ulimit -f 2; exec "$@"', "sh", ASKED.bench, "forward", "-b", "1",
                 "-e", "64", "-J", lines, *SMALL], capture_output=True, text=True, timeout=120,
                check=False)
            self.assertEqual(done.returncode, 3)
            self.assertIn(f"cannot write {lines}: File too large", done.stderr)
            with open(lines, encoding="utf-8") as file:
                rows = file.read()
            self.assertTrue(rows.endswith("}\n"))
            self.assertGreater(len([json.loads(row) for row in rows.splitlines()]), 0)

    def test_json_where_none_can_be(self):
        with tempfile.TemporaryDirectory() as folder:
            fifo = os.path.join(folder, "fifo")
            os.mkfifo(fifo)  # that nobody reads
            done = run("forward", "-b", "1", "-J", fifo, *SMALL)
            self.assertEqual((done.returncode, done.stdout), (3, ""), done.stderr)
            odd = os.fsencode(folder) + b"/\xff.jsonl"
            done = subprocess.run([ASKED.bench, "forward", "-b", "1", "-J", odd, *SMALL],
                                  capture_output=True, timeout=120, check=False)
            self.assertEqual((done.returncode, done.stderr), (0, b""))
            with open(odd, encoding="utf-8") as file:
                self.assertIn(r"\xff.jsonl", json.loads(file.readline())["command"])

    def test_signals(self):
        for number in (signal.SIGINT, signal.SIGTERM):
            with self.subTest(number=number):
                process = subprocess.Popen([ASKED.bench, "forward", *SMALL, "-b", "1", "-r", "1000000"],
                                           stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
                for _ in range(6):  # the heading: it is at work then
                    process.stdout.readline()
                process.send_signal(number)
                self.assertEqual(process.communicate(timeout=60)[1],
                                 "oproj-bench: interrupted\n")
                self.assertEqual(process.returncode, 4)

    def test_full_output_is_a_failure(self):
        with open("/dev/full", "w", encoding="utf-8") as full:
            done = subprocess.run([ASKED.bench, "forward", "-b", "1", *SMALL], stdout=full,
                                  stderr=subprocess.PIPE, text=True, timeout=120, check=False)
        self.assertEqual(done.returncode, 4)
        self.assertIn("oproj-bench: cannot write to standard output", done.stderr)

    def test_help(self):
        done = run("--help")
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertIn("inv_rope", done.stdout)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name in ("bench", "oproj", "compare", "mpirun"):
        parser.add_argument("--" + name, required=True)
    ASKED, rest = parser.parse_known_args()
    unittest.main(argv=sys.argv[:1] + rest)
