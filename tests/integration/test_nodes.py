"""Owns the proof that a job runs over several hosts, and ends when the link between them is cut.

    python3 tests/integration/test_nodes.py --oproj PATH/oproj --mpirun mpirun --workdir DIR

Hosts are network namespaces of this machine, with names of their own, joined by a virtual cable;
mpirun starts its daemon in the other one through an agent that enters it.  Needs root and iproute2:
exit status 77 where namespaces may not be made, 0 = all cases hold.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import test_faults as faults

SKIPPED = 77
DEADLINE_S = 4
# As in env.sh, but quicker than the deadline here.
KEEPALIVE = {"OMPI_MCA_oob_tcp_keepalive_time": "1", "OMPI_MCA_oob_tcp_keepalive_intvl": "1",
             "OMPI_MCA_oob_tcp_keepalive_probes": "1"}
ADDRESSES = {"a": "10.213.77.1", "b": "10.213.77.2"}


class Hosts:
    """Two namespaces and the cable between them."""

    def __init__(self, workdir):
        self.names = {side: f"oproj{os.getpid()}{side}" for side in ADDRESSES}
        self.agent = workdir / "agent"
        self.agent.write_text(
            "#!/bin/sh\n# agent HOST COMMAND: runs it on that host, as ssh would\n"
            f"name={self.names['b']}\n"
            f"[ \"$1\" = {ADDRESSES['b']} ] || name={self.names['a']}\n"
            "shift\n"
            "exec ip netns exec \"$name\" unshare -u sh -c \"hostname $name; $*\"\n")
        self.agent.chmod(0o755)

    def make(self):
        for name in self.names.values():
            ip("netns", "add", name)
        ip("link", "add", "cable", "netns", self.names["a"], "type", "veth", "peer", "name",
           "cable", "netns", self.names["b"])
        for side, name in self.names.items():
            ip("-n", name, "addr", "add", f"{ADDRESSES[side]}/24", "dev", "cable")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", "cable", "up")

    def cut(self):
        ip("-n", self.names["b"], "link", "set", "cable", "down")

    def mend(self):
        ip("-n", self.names["b"], "link", "set", "cable", "up")

    def remove(self):
        for name in self.names.values():
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL, check=False)

    def command(self, arguments, each, words):
        hosts = ",".join(f"{address}:{each}" for address in ADDRESSES.values())
        network = "10.213.77.0/24"
        return ["ip", "netns", "exec", self.names["a"], "unshare", "-u", "sh", "-c",
                f"hostname {self.names['a']}; exec \"$@\"", "sh", arguments.mpirun, "-n",
                str(2 * each), "-H", hosts, "--mca", "plm_rsh_agent", str(self.agent), "--mca",
                "oob_tcp_if_include", network, "--mca", "btl_tcp_if_include", network, "-x",
                "OPROJ_DEADLINE", "-x", "OMP_NUM_THREADS", arguments.oproj, *words]


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class Job(faults.Job):
    def start(self, command):
        self.scratch.mkdir()
        return subprocess.Popen(command, env=self.environment() | KEEPALIVE,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                start_new_session=True, errors="replace")

    def end(self):
        for pid in faults.processes_of(self.mark):
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.scratch, ignore_errors=True)


def run_case(arguments, hosts, workdir, each):
    job = Job(arguments, workdir)
    try:
        process = job.start(hosts.command(arguments, each, [
            "run", str(workdir / "model"), "--tokens", "4", "--layers", "0", "--check"]))
        stdout, stderr = process.communicate(timeout=60)
        watched = "nobody watches" not in stderr
        right = process.returncode == 0 and f"# {2 * each} ranks" in stdout and watched
        return right, "" if right else f"code {process.returncode}: {stdout}{stderr}"
    except subprocess.TimeoutExpired:
        return False, "no end within 60 s"
    finally:
        job.end()


def cut_case(arguments, hosts, workdir, each):
    """The link goes away when the first layer is done."""
    job = Job(arguments, workdir)
    try:
        process = job.start(hosts.command(arguments, each, [
            "run", str(workdir / "model"), "--tokens", "256"]))
        while not process.stdout.readline().startswith(" layers.0"):
            if process.poll() is not None:
                return False, f"it ended early: {process.communicate()[1]}"
        hosts.cut()
        begin = time.monotonic()
        stderr = process.communicate(timeout=DEADLINE_S + faults.LIMIT_S)[1]
        seconds = time.monotonic() - begin
        said = faults.sentences(stderr)
        time.sleep(max(0, DEADLINE_S + 8 - seconds))  # the other side ends by itself
        left = faults.processes_of(job.mark)
        # mpirun's own connection is cut as well: whoever notices first names rank or host.
        named = f"rank {each} " in stderr or "rank 0 " in stderr or ADDRESSES["b"] in stderr
        right = process.returncode != 0 and len(said) <= 1 and named and not left
        return right, f"code {process.returncode}, {seconds:.1f} s, said {said}, left {left}"
    except subprocess.TimeoutExpired:
        return False, "no end: " + str([Path(f"/proc/{pid}/cmdline").read_bytes()[:60]
                                        for pid in faults.processes_of(job.mark)])
    finally:
        job.end()
        hosts.mend()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--oproj", required=True)
    parser.add_argument("--mpirun", default="mpirun")
    parser.add_argument("--workdir", required=True, type=Path)
    parser.set_defaults(deadline=DEADLINE_S)
    arguments = parser.parse_args()
    workdir = arguments.workdir.absolute()
    shutil.rmtree(workdir, ignore_errors=True)
    workdir.mkdir(parents=True)
    hosts, failed = Hosts(workdir), 0
    try:
        hosts.make()
        subprocess.run(["ip", "netns", "exec", hosts.names["a"], "unshare", "-u", "true"],
                       check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"no network namespaces here: {getattr(error, 'stderr', None) or error}")
        hosts.remove()
        return SKIPPED
    try:
        subprocess.run([arguments.oproj, "synth", "--model", "v4-flash", "--layers", "3", "--mtp",
                        "0", "--out", workdir / "model"], check=True, stdout=subprocess.DEVNULL)
        for name, case, each in (("run", run_case, 2), ("run", run_case, 4),
                                 ("cut", cut_case, 2)):
            right, words = case(arguments, hosts, workdir, each)
            failed += not right
            print(f"{'ok  ' if right else 'FAIL'} {name} 2 x {each}: {words}", flush=True)
    finally:
        hosts.remove()
        shutil.rmtree(workdir, ignore_errors=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
