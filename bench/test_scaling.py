#!/usr/bin/env python3
"""test_scaling.py - bench/scaling on CPU ranks: what it lists, runs, writes and refuses.

No time is looked at.  The tests are left out: this is one of them."""
import argparse
import json
import os
import subprocess
import sys
import tempfile
import unittest

ASKED = None


def scaling(*words):
    return subprocess.run([sys.executable, "-B", ASKED.scaling, *words], capture_output=True,
                          text=True, timeout=100, check=False)


def lines_of(*path):
    with open(os.path.join(*path), encoding="utf-8") as file:
        return [json.loads(line) for line in file]


class ScalingTest(unittest.TestCase):
    def run_it(self, out, *words):
        return scaling("--build", ASKED.build, "--quick", "--ranks", "1,2", "--parts",
                       "run,bench,reduce,load", "--launcher", ASKED.mpirun + " -q -n {n}", "--out",
                       out, *words)

    def test_run(self):
        with tempfile.TemporaryDirectory() as folder:
            out = os.path.join(folder, "out")
            done = self.run_it(out)
            self.assertEqual((done.returncode, done.stderr), (0, ""), done.stdout)
            machine, *rest = lines_of(out, "steps.jsonl")
            self.assertEqual((machine["kind"], machine["profile"]), ("machine", "quick"))
            steps = [r for r in rest if r["kind"] == "step"]
            self.assertEqual({r["state"] for r in steps}, {"passed"})
            self.assertEqual({r["ranks"] for r in steps if "run" in r}, {1, 2})
            self.assertTrue(all(r["run"]["passed"] for r in steps if "run" in r))
            verdicts = [(r["passed"], r["ranks"]) for r in rest if r["kind"] == "verdict"]
            self.assertEqual(verdicts, [(True, [1, 2])])
            rows = lines_of(out, "bench.jsonl")
            self.assertEqual({(r["case"], r["ranks"], r["reduce"]) for r in rows},
                             {("layer", 1, "all"), ("layer", 2, "all"), ("forward", 2, None),
                              ("reduce", 2, "all"), ("reduce", 2, "vendor"),
                              ("reduce", 2, "scatter"), ("load", 1, None), ("load", 2, None)})
            self.assertEqual({r["wrong"] for r in rows if r["case"] != "load"}, {0})
            self.assertTrue(lines_of(out, "projected.jsonl"))
            with open(os.path.join(out, "report.md"), encoding="utf-8") as file:
                report = file.read()
            for text in ("whole layer", "layer less forward", "The sum alone", "Loading",
                         "nobody's result", "## Projected, not measured",
                         "exact data bit-equal over n = 1, 2: yes", "bench/scaling --build"):
                self.assertIn(text, report)
            self.assertEqual("matplotlib is not installed" in done.stdout,
                             not os.path.exists(os.path.join(out, "measured-ranks.svg")))
            self.assertEqual(self.run_it(out).returncode, 2)  # it keeps what is there
            self.assertEqual(scaling("--report", "--out", out).returncode, 0)

    def test_dry_run_lists_and_leaves_nothing(self):
        with tempfile.TemporaryDirectory() as folder:
            done = self.run_it(os.path.join(folder, "out"), "--dry-run")
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            self.assertEqual(os.listdir(folder), [])
            self.assertIn("oproj-bench layer --model tiny", done.stdout)
            self.assertIn("# all: ", done.stdout)

    def test_no_time_left(self):
        with tempfile.TemporaryDirectory() as folder:
            done = self.run_it(folder, "--budget", "0")
            self.assertEqual(done.returncode, 0)
            steps = [r for r in lines_of(folder, "steps.jsonl") if r["kind"] == "step"]
            self.assertEqual({r["state"] for r in steps}, {"left out"})
            with open(os.path.join(folder, "report.md"), encoding="utf-8") as file:
                self.assertIn("left out: `layer.tiny.2`", file.read())

    def test_a_failed_step_is_the_runs(self):
        with tempfile.TemporaryDirectory() as folder:
            done = self.run_it(folder, "--parts", "load", "--launcher", "false {n}")
            self.assertEqual(done.returncode, 1)
            states = {r["name"]: r["state"] for r in lines_of(folder, "steps.jsonl")
                      if r["kind"] == "step"}
            self.assertEqual(states, {"synth.tiny": "passed", "load.tiny.1": "failed",
                                      "load.tiny.2": "failed"})

    def test_no_launcher_and_a_time_out(self):
        for launcher, reason in (("nowhere {n}", "No such file"), ("sh -c 'sleep 99' {n}",
                                                                   "time-out")):
            with self.subTest(launcher=launcher), tempfile.TemporaryDirectory() as folder:
                done = self.run_it(folder, "--parts", "load", "--launcher", launcher, "--ranks",
                                   "1", "--budget", "4")
                self.assertEqual(done.returncode, 1)
                reasons = [r["reason"] for r in lines_of(folder, "steps.jsonl")
                           if r["kind"] == "step"]
                self.assertIn(reason, reasons[-1])

    def test_refusals(self):
        for code, words in ((2, []), (2, ["--build", ASKED.build, "--ranks", "3"]),
                            (2, ["--build", ASKED.build, "--quick", "--ranks", "8", "--dry-run"]),
                            (2, ["--build", ASKED.build, "--parts", "all"]),
                            (4, ["--build", "/nowhere"]), (4, ["--report", "--out", "/nowhere"])):
            with self.subTest(words=words):
                self.assertEqual(scaling(*words).returncode, code)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name in ("scaling", "build", "mpirun"):
        parser.add_argument("--" + name, required=True)
    ASKED, others = parser.parse_known_args()
    unittest.main(argv=sys.argv[:1] + others)
