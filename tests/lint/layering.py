#!/usr/bin/env python3
"""layering.py [ROOT] - keeps the house in order: who may include whom, where vendors stop, style.

    base <- {kernels, weights} <- tp <- {job <- {launch, bench}, tests}

Prints each violation as `file:line: sentence` and exits 1 if there is any.  The rules are tables at
the top of this file; test_layering.py plants a violation of each and expects it to be found.
"""
import fnmatch
import os
import re
import sys

COLUMNS = 100
SOURCES = (".c", ".h", ".cu", ".cuh")
HEADERS = (".h", ".cuh")
TREES = ("src", "include", "job", "launch", "bench", "tests", "cmake")

# What a file of each folder may include of ours: the first pattern that matches the folder counts.
# A path ending in "/" means that folder's own headers, not those of folders below.
OURS = (
    (r"src/base/", ("base/", "oproj.h")),
    (r"src/kernels/ref/", ("base/", "kernels/kernels.h", "kernels/ref/", "oproj.h")),
    (r"src/kernels/cuda/", ("base/", "kernels/kernels.h", "kernels/cuda/", "oproj.h")),
    (r"src/kernels/", ("base/", "kernels/", "oproj.h")),
    (r"src/weights/", ("base/", "weights/", "oproj.h", "oproj/checkpoint.h",
                       "oproj/safetensors.h")),
    (r"src/tp/", ("base/", "kernels/kernels.h", "weights/source.h", "tp/", "oproj.h",
                  "oproj/")),
    (r"src/", ()),
    (r"include/", ("oproj.h", "oproj/")),
    (r"job/", ("oproj.h", "oproj/")),
    (r"launch/", ("oproj.h", "oproj/", "job/")),
    (r"bench/", ("oproj.h", "oproj/", "job/")),
)

# Vendor or third-party headers, and the only places that may include them.  A place is what a path
# begins with, or a pattern of whole paths.
LIBRARIES = (
    ("CUDA", r"(cuda|cublas|nv)[^/]*\.(h|hpp)$|(cuda|nvtx3|cub|thrust|cute|cutlass)/"
             r"|(cooperative_groups|mma|crt/.*)\.h$",
     ("src/kernels/cuda/", "include/oproj/cuda.h", "bench/*_cuda.c")),
    ("MPI", r"mpi[^/]*\.h$",
     ("src/tp/", "include/oproj/mpi.h", "include/oproj/cuda.h", "job/", "bench/")),
    ("NCCL", r"nccl[^/]*\.h$", ("src/tp/", "include/oproj/mpi.h", "include/oproj/cuda.h")),
    ("hwloc", r"hwloc(\.h$|/)", ("src/tp/", "include/oproj/mpi.h", "include/oproj/cuda.h")),
    ("jansson", r"jansson[^/]*\.h$", ("src/weights/", "job/", "launch/", "bench/")),
    ("xxHash", r"xxh(ash|3)\.h$", ("src/weights/", "job/", "launch/")),
    ("argp", r"argp\.h$", ("launch/", "bench/")),
)

C_HEADERS = set("""assert complex ctype errno fenv float inttypes iso646 limits locale math setjmp
    signal stdalign stdarg stdatomic stdbool stddef stdint stdio stdlib stdnoreturn string tgmath
    threads time uchar wchar wctype
    dirent dlfcn fcntl fnmatch ftw getopt glob ifaddrs libgen netdb poll pthread pwd regex sched semaphore
    spawn strings syslog unistd alloca endian malloc
    omp immintrin""".split())
SYSTEM_FOLDERS = ("sys/", "linux/", "net/", "netinet/", "arpa/")
CXX_HEADERS = set("""cstddef cstdint cstdio cstdlib cstring cmath climits cfloat type_traits utility
    limits array initializer_list algorithm tuple""".split())

CONDITIONS = {"defined", "__cplusplus", "__CUDACC__", "__CUDA_ARCH__",
              "__CUDA_ARCH_FEAT_SM90_ALL"}
ENDS = "exit _exit _Exit quick_exit abort assert"
SPEAKS = "printf vprintf puts putchar perror"

# A string, character constant or comment, whichever begins first.
TOKENS = re.compile(r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|/\*.*?(?:\*/|\Z)|//[^\n]*', re.S)
DIRECTIVE = re.compile(r"^[ \t]*#[ \t]*(\w+)[ \t]*(.*)$")


def keep_lines(text):
    return re.sub(r"[^\n]", " ", text)


def without_comments(text):
    return TOKENS.sub(lambda m: keep_lines(m.group()) if m.group()[0] == "/" else m.group(), text)


def without_strings(text):
    return TOKENS.sub(lambda m: keep_lines(m.group()), text)


def joined(text):
    """Lines with their numbers, continuations joined to the line they continue."""
    number, parts = 1, []
    for at, line in enumerate(text.split("\n"), 1):
        number = number if parts else at
        parts.append(line[:-1] if line.endswith("\\") else line)
        if not line.endswith("\\"):
            yield number, " ".join(parts)
            parts = []
    if parts:
        yield number, " ".join(parts)


def guard_of(path):
    """src/kernels/ref/ref.h -> OPROJ_KERNELS_REF_H: a folder's contract is named by the folder."""
    parts = path.split("/")
    if parts[0] in ("src", "include"):
        parts = parts[1:]
    stem, suffix = os.path.splitext(parts[-1])
    parts[-1] = stem
    if len(parts) > 1 and parts[-1] == parts[-2]:
        parts = parts[:-1]
    if parts[0] not in ("oproj", "tests"):
        parts.insert(0, "oproj")
    return re.sub(r"\W", "_", "_".join(parts) + "_" + suffix[1:]).upper()


class Lint:
    def __init__(self, root):
        self.root = root
        self.found = []

    def add(self, rule, path, line, sentence):
        self.found.append((path, line, rule, sentence))

    # ---- includes ------------------------------------------------------------------------------

    def is_ours(self, path, target, quoted):
        """The name under which our own header is known, or None for somebody else's."""
        if target == "oproj.h" or target.startswith("oproj/"):
            return target
        if re.match(r"(base|kernels|weights|tp|job|launch)/", target):
            return target
        if not quoted:
            return None
        beside = os.path.join(os.path.dirname(path), target)
        if os.path.isfile(os.path.join(self.root, beside)):
            return beside[len("src/"):] if beside.startswith("src/") else beside
        return None

    def check_include(self, path, line, rest):
        match = re.match(r'([<"])([^>"]+)[>"]\s*$', rest)
        if not match:
            self.add("include-form", path, line,
                     "an #include must name its header, so that layering can be read")
            return
        quoted, target = match.group(1) == '"', match.group(2)
        if ".." in target.split("/"):
            self.add("include-form", path, line,
                     f'"{target}" climbs with ".."; paths start at src/ or include/')
            return
        name = self.is_ours(path, target, quoted)
        if name is not None:
            self.check_ours(path, line, name)
        else:
            self.check_theirs(path, line, target)

    def check_ours(self, path, line, name):
        allowed = next((a for folder, a in OURS if path.startswith(folder)), None)
        if allowed is None:
            return
        top = path.split("/")[0]
        if top in ("job", "launch", "bench") and name.startswith(top + "/"):
            return
        folder = os.path.dirname(name) + "/"
        if name in allowed or (folder != "/" and folder in allowed):
            return
        self.add("include-ours", path, line,
                 f"{os.path.dirname(path)} must not include {name}; it may include "
                 + (", ".join(allowed) or "nothing"))

    def check_theirs(self, path, line, target):
        if path.startswith("tests/"):
            return
        for library, pattern, places in LIBRARIES:
            if re.match(pattern, target):
                if not any(path.startswith(p) or fnmatch.fnmatchcase(path, p) for p in places):
                    self.add("library-" + library, path, line,
                             f"{target} is {library}'s, which stops in {', '.join(places)}")
                return
        stem, suffix = os.path.splitext(target)
        if suffix == ".h" and (stem in C_HEADERS or target.startswith(SYSTEM_FOLDERS)):
            return
        if path.endswith((".cu", ".cuh")) and target in CXX_HEADERS:
            return
        self.add("include-unknown", path, line,
                 f"{target} is no header of ours, of C or POSIX, or of a library listed in "
                 "tests/lint/layering.py")

    # ---- one file ------------------------------------------------------------------------------

    def check_guard(self, path, directives):
        want = guard_of(path)
        line = directives[0][0] if directives else 1
        names = [(word, rest.split()[0] if rest.split() else "") for _, word, rest in directives]
        if names[:2] != [("ifndef", want), ("define", want)] or names[-1][0] != "endif":
            self.add("guard", path, line, f"a header begins with the include guard {want}")

    def check_condition(self, path, line, word, rest, is_guard):
        if word not in ("if", "ifdef", "ifndef", "elif", "elifdef", "elifndef") or is_guard:
            return
        names = set(re.findall(r"\b[A-Za-z_]\w*", rest))
        if not names or names - CONDITIONS:
            self.add("feature-if", path, line,
                     f"#{word} {rest.strip()}: absence is a linked twin file, not an #if")

    def check_calls(self, path, code):
        for number, line in enumerate(code.split("\n"), 1):
            for name in re.findall(r"(?<![\w.>])(\w+)\s*\(", line):
                if name in ENDS.split():
                    self.add("ends-process", path, number,
                             f"{name}() in the library; return an oproj_status")
                elif name in SPEAKS.split():
                    self.add("prints", path, number,
                             f"{name}() in the library; base/log.h speaks for it")
            if re.search(r"\bstdout\b", line):
                self.add("prints", path, number, "the library never writes to stdout")
            if re.search(r"\bstderr\b", line) and path != "src/base/log.c":
                self.add("stderr", path, number, "only base/log.c writes to stderr")

    def check_layout(self, path, text):
        for number, line in enumerate(text.split("\n"), 1):
            if len(line) > COLUMNS:
                self.add("columns", path, number, f"{len(line)} columns; {COLUMNS} is the limit")
            if "\t" in line:
                self.add("tab", path, number, "a tab; indent with spaces")
            if line != line.rstrip():
                self.add("blank", path, number, "blanks at the end of the line")

    def check_source(self, path, text):
        bare = without_comments(text)
        directives = []
        for number, line in joined(bare):
            match = DIRECTIVE.match(line)
            if match:
                directives.append((number, match.group(1), match.group(2).strip()))
        if path.endswith(HEADERS):
            self.check_guard(path, directives)
        if path.endswith((".cu", ".cuh")) and not path.startswith("src/kernels/cuda/"):
            self.add("cu-place", path, 1, "CUDA source outside src/kernels/cuda")
        for at, (number, word, rest) in enumerate(directives):
            if word in ("include", "include_next", "import"):
                self.check_include(path, number, rest if word == "include" else "")
            elif path.startswith("src/"):
                is_guard = at == 0 and word == "ifndef" and path.endswith(HEADERS)
                self.check_condition(path, number, word, rest, is_guard)
        if path.startswith("src/"):
            self.check_calls(path, without_strings(text))

    def check_file(self, path):
        name = os.path.basename(path)
        source = name.endswith(SOURCES)
        if not source and not name.endswith(".cmake") and name != "CMakeLists.txt":
            return
        with open(os.path.join(self.root, path), encoding="utf-8", newline="") as file:
            text = file.read()
        self.check_layout(path, text)
        if source:
            self.check_source(path, text)

    def run(self):
        top = os.path.join(self.root, "CMakeLists.txt")
        paths = ["CMakeLists.txt"] if os.path.isfile(top) else []
        for tree in TREES:
            for folder, _, names in os.walk(os.path.join(self.root, tree)):
                paths += [os.path.relpath(os.path.join(folder, n), self.root) for n in names]
        if not any(p.startswith("src/") for p in paths):
            self.add("empty", ".", 1, "no file under src; is this the repository's root?")
        for path in sorted(p.replace(os.sep, "/") for p in paths):
            self.check_file(path)
        return sorted(self.found)


def main():
    here = os.path.dirname(os.path.abspath(__file__))
    root = sys.argv[1] if len(sys.argv) > 1 else os.path.join(here, "..", "..")
    found = Lint(root).run()
    for path, line, _, sentence in found:
        print(f"{path}:{line}: {sentence}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
