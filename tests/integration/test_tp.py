"""Owns the proof that the ranks of one host give one result, whatever their number.

    python3 tests/integration/test_tp.py --oproj PATH/oproj --workdir DIR --ranks N[,N...]
                                         --backend ref|cuda [--sm100]

`oproj run` on an exact checkpoint, on one rank and on each N: the same y, bit for bit; few tokens
are checked against double precision too.  With cuda there is a GPU for each rank, sums go through
NCCL, and many tokens run as well; exit status 77 where there are fewer GPUs, with
OPROJ_REQUIRE_GPU=1 a failure.  --sm100: all GPUs are SM100 or SM103 and take the paths that those
have; 77 elsewhere, or where there are fewer, with OPROJ_REQUIRE_SM100=1 a failure.

OPROJ_TEST_LAUNCHER starts {n} ranks of {oproj}: "mpirun -n {n} {oproj}" where it is not set; in an
allocation of Slurm "srun --mpi=pmix -n {n} --cpu-bind=none --gpu-bind=none {oproj}", or by the
Slurm script "sbatch --wait --ntasks-per-node={n} --gpus-per-node={n} launch/oproj.sbatch".
"""

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

SKIPPED = 77
FEW, MANY = 16, 1024  # tokens; the library's path begins at 768
RUN_LIMIT_S = 300
SM100 = ("10.0", "10.3")


class Failure(Exception):
    pass


def run(command):
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False,
                          timeout=RUN_LIMIT_S)
    if done.returncode != 0:
        raise Failure(f"{shlex.join(map(str, command))}: exit code {done.returncode}\n"
                      f"{done.stdout}{done.stderr}")


def missing(asked):
    """(What this machine lacks, the variable that makes that a failure); None: nothing."""
    if asked.backend == "ref":
        return None
    required = "OPROJ_REQUIRE_SM100" if asked.sm100 else "OPROJ_REQUIRE_GPU"
    path = asked.workdir / "info.json"
    run([asked.oproj, "info", "--json", path])
    devices = json.loads(path.read_text())["devices"]
    if len(devices) < max(asked.ranks):
        return f"{len(devices)} GPUs for {max(asked.ranks)} ranks", required
    found = [re.search(r"capability ([\d.]+)", text).group(1) for text in devices]
    if asked.sm100 and not set(found) <= set(SM100):
        return f"no SM100: capabilities {', '.join(found)}", required
    return None


def project(asked, checkpoint, ranks, tokens):
    """The layers of `oproj run`'s report."""
    result = asked.workdir / f"{ranks}.{tokens}.json"
    launcher = os.environ.get("OPROJ_TEST_LAUNCHER", "mpirun -n {n} {oproj}")
    comm = "nccl" if asked.backend == "cuda" and ranks > 1 else "mpi"
    run([*(word.format(n=ranks, oproj=asked.oproj) for word in shlex.split(launcher)), "run",
         checkpoint, "--tokens", tokens, "--backend", asked.backend, "--comm", comm, "--json",
         result, *(["--check"] if tokens <= FEW else [])])
    report = json.loads(result.read_text())
    if (report["ranks"], report["comm"]) != (ranks, comm):
        raise Failure(f"{report['ranks']} ranks over {report['comm']}, wanted {ranks} over {comm}")
    return report["layers"]


def compare(asked, checkpoint, tokens):
    want = project(asked, checkpoint, 1, tokens)
    for ranks in asked.ranks:
        got = project(asked, checkpoint, ranks, tokens)
        for one, many in zip(want, got, strict=True):
            if one["checksum"] != many["checksum"]:
                raise Failure(f"{tokens} tokens, {one['layer']}: {ranks} ranks give another y")
            if asked.sm100 and tokens >= MANY and many["path"] != "library-fast":
                raise Failure(f"{tokens} tokens on {ranks} ranks of SM100 took {many['path']}")
        paths = sorted({row["path"] for row in got})
        print(f"ok {tokens} tokens, {ranks} ranks, {', '.join(paths)}", flush=True)


def main():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--oproj", required=True)
    parser.add_argument("--workdir", type=Path, required=True)
    parser.add_argument("--ranks", required=True,
                        type=lambda text: [int(word) for word in text.split(",")])
    parser.add_argument("--backend", choices=("ref", "cuda"), required=True)
    parser.add_argument("--sm100", action="store_true")
    asked = parser.parse_args()
    shutil.rmtree(asked.workdir, ignore_errors=True)
    asked.workdir.mkdir(parents=True)
    try:
        lack = missing(asked)
        if lack:
            print(lack[0])
            return 1 if os.environ.get(lack[1]) == "1" else SKIPPED
        checkpoint = asked.workdir / "v4-flash"
        run([asked.oproj, "synth", "--model", "v4-flash", "--layers", 1, "--mtp", 0, "--exact",
             "--out", checkpoint])
        for tokens in (FEW, MANY) if asked.backend == "cuda" else (2,):
            compare(asked, checkpoint, tokens)
    except Failure as failure:
        print(failure)
        return 1
    finally:
        shutil.rmtree(asked.workdir / "v4-flash", ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
