#!/usr/bin/env python3
"""Plants one violation of each kind in a small clean tree and expects layering.py to find it, there
and nowhere else; and plants what must not be taken for one.  A lint that cannot fail is no lint."""
import os
import tempfile
import unittest

import layering

CLEAN = {
    "CMakeLists.txt": "project(clean C)\n",
    "src/base/error.h": "/* Comments may printf(), abort() or exit() freely. */\n",
    "src/base/log.c": '#include "base/error.h"\n#include <stdio.h>\n'
                      'void f(void) { fprintf(stderr, "exit(1), stdout\\n"); }\n',
    "src/kernels/kernels.h": '#include "oproj.h"\n',
    "src/kernels/select.c": '#include "base/error.h"\n#include "kernels/kernels.h"\n',
    "src/kernels/ref/ref.h": '#include "kernels/kernels.h"\n',
    "src/kernels/ref/a.c": '#include "ref.h"\n#include "base/error.h"\n',
    "src/kernels/cuda/cuda.h": '#include <cuda_runtime.h>\n#include <nvtx3/nvToolsExt.h>\n',
    "src/kernels/cuda/a.cu": '#include "kernels/cuda/cuda.h"\n#include <cstdint>\n',
    "src/weights/weights.h": '#include "oproj/checkpoint.h"\n#include <jansson.h>\n',
    "src/weights/a.c": '#include "weights/weights.h"\n#include <xxhash.h>\n#include <sys/stat.h>\n',
    "src/tp/comm.h": '#include "oproj.h"\n',
    "src/tp/a.c": '#include "tp/comm.h"\n#include "weights/source.h"\n#include "kernels/kernels.h"\n#include "oproj/mpi.h"\n'
                  '#include <hwloc.h>\n#include <mpi.h>\n#include <nccl.h>\n',
    "include/oproj.h": "#include <stdint.h>\n#ifdef ANY\n#endif\n",
    "include/oproj/checkpoint.h": '#include "oproj.h"\n',
    "include/oproj/mpi.h": '#include <mpi.h>\n#include "oproj.h"\n',
    "include/oproj/cuda.h": '#include <cuda_runtime_api.h>\n#include <nccl.h>\n',
    "job/job.h": '#include "oproj.h"\n',
    "job/job.c": '#include "job/job.h"\n#include "oproj/mpi.h"\n#include <mpi.h>\n',
    "launch/args.h": "#include <argp.h>\n",
    "launch/main.c": '#include "args.h"\n#include "oproj/checkpoint.h"\n#include <jansson.h>\n'
                     '#include "job/job.h"\nint main(void) { puts("x"); exit(0); }\n',
    "bench/bench.h": '#include "oproj.h"\n',
    "bench/bench.c": '#include "bench.h"\n#include "job/job.h"\n',
    "bench/device_cuda.c": '#include "bench.h"\n#include <cuda_runtime_api.h>\n',
    "tests/unit/test_a.c": '#include <check.h>\n#include "kernels/ref/ref.h"\n',
}

# rule, file that gets the line, the line, and a word its sentence must hold.
VIOLATIONS = [
    ("include-ours", "src/base/x.c", '#include "kernels/kernels.h"', "kernels/kernels.h"),
    ("include-ours", "src/base/x.c", '#include "weights/weights.h"', "weights/weights.h"),
    ("include-ours", "src/base/x.c", '#include "tp/comm.h"', "tp/comm.h"),
    ("include-ours", "src/base/x.c", '#include "oproj/checkpoint.h"', "oproj/checkpoint.h"),
    ("include-ours", "src/base/x.c", "#include <tp/comm.h>", "tp/comm.h"),
    ("include-ours", "src/kernels/x.c", '#include "weights/weights.h"', "weights/weights.h"),
    ("include-ours", "src/kernels/x.c", '#include "tp/comm.h"', "tp/comm.h"),
    ("include-ours", "src/kernels/x.c", '#include "oproj/checkpoint.h"', "oproj/checkpoint.h"),
    ("include-ours", "src/kernels/x.c", '#include "kernels/ref/ref.h"', "kernels/ref/ref.h"),
    ("include-ours", "src/kernels/x.c", '#include "ref/ref.h"', "kernels/ref/ref.h"),
    ("include-ours", "src/kernels/ref/x.c", '#include "kernels/cuda/cuda.h"', "kernels/cuda"),
    ("include-ours", "src/kernels/cuda/x.c", '#include "kernels/ref/ref.h"', "kernels/ref/ref.h"),
    ("include-ours", "src/weights/x.c", '#include "kernels/kernels.h"', "kernels/kernels.h"),
    ("include-ours", "src/weights/x.c", '#include "tp/comm.h"', "tp/comm.h"),
    ("include-ours", "src/weights/x.c", '#include "oproj/mpi.h"', "oproj/mpi.h"),
    ("include-ours", "src/tp/x.c", '#include "kernels/ref/ref.h"', "kernels/ref/ref.h"),
    ("include-ours", "src/tp/x.c", '#include "kernels/cuda/cuda.h"', "kernels/cuda/cuda.h"),
    ("include-ours", "src/tp/x.c", '#include "weights/weights.h"', "weights/weights.h"),
    ("include-ours", "src/x.c", '#include "base/error.h"', "base/error.h"),
    ("include-ours", "include/oproj/x.c", '#include "base/error.h"', "base/error.h"),
    ("include-ours", "launch/x.c", '#include "base/error.h"', "base/error.h"),
    ("include-ours", "launch/x.c", '#include "tp/comm.h"', "tp/comm.h"),
    ("include-ours", "bench/x.c", '#include "kernels/kernels.h"', "kernels/kernels.h"),
    ("include-ours", "bench/x.c", '#include "launch/report.h"', "launch/report.h"),
    ("include-ours", "job/x.c", '#include "launch/report.h"', "launch/report.h"),
    ("include-ours", "job/x.c", '#include "tp/watch.h"', "tp/watch.h"),
    ("include-ours", "src/tp/x.c", '#include "job/choose.h"', "job/choose.h"),
    ("include-form", "launch/x.c", '#include "../src/base/error.h"', ".."),
    ("include-form", "src/tp/x.c", "#include HEADER", "name its header"),
    ("include-form", "src/tp/x.c", "#include_next <stdio.h>", "name its header"),
    ("include-unknown", "src/tp/x.c", "#include <torch/extension.h>", "torch/extension.h"),
    ("include-unknown", "src/tp/x.c", '#include "nowhere.h"', "nowhere.h"),
    ("include-unknown", "launch/x.c", "#include <check.h>", "check.h"),
    ("include-unknown", "src/base/x.c", "#include <cstdint>", "cstdint"),
    ("library-CUDA", "src/tp/x.c", "#include <cuda_runtime.h>", "cuda_runtime.h"),
    ("library-CUDA", "src/kernels/x.c", "#include <cublasLt.h>", "cublasLt.h"),
    ("library-CUDA", "src/kernels/ref/x.c", "#include <nvtx3/nvToolsExt.h>", "nvToolsExt.h"),
    ("library-CUDA", "src/base/x.c", "#include <nvml.h>", "nvml.h"),
    ("library-CUDA", "include/oproj/x.c", "#  include   <cuda.h> /* why */", "cuda.h"),
    ("library-CUDA", "launch/x.c", "#include <cuda_bf16.h>", "cuda_bf16.h"),
    ("library-CUDA", "bench/x.c", "#include <cublasLt.h>", "cublasLt.h"),
    ("library-CUDA", "bench/cuda.c", "#include <cuda_runtime.h>", "cuda_runtime.h"),
    ("library-CUDA", "launch/x_cuda.c", "#include <cuda_runtime.h>", "cuda_runtime.h"),
    ("library-MPI", "src/kernels/x.c", "#include <mpi.h>", "mpi.h"),
    ("library-MPI", "src/weights/x.c", "#include <mpi.h>", "mpi.h"),
    ("library-NCCL", "src/kernels/cuda/x.c", "#include <nccl.h>", "nccl.h"),
    ("library-NCCL", "launch/x.c", '#include "nccl_net.h"', "nccl_net.h"),
    ("library-hwloc", "launch/x.c", "#include <hwloc.h>", "hwloc.h"),
    ("library-hwloc", "src/base/x.c", "#include <hwloc/bitmap.h>", "hwloc/bitmap.h"),
    ("library-jansson", "src/tp/x.c", "#include <jansson.h>", "jansson.h"),
    ("library-xxHash", "src/kernels/ref/x.c", "#include <xxhash.h>", "xxhash.h"),
    ("library-argp", "src/base/x.c", "#include <argp.h>", "argp.h"),
    ("cu-place", "src/tp/x.cu", "__device__ int x;", "outside"),
    ("cu-place", "bench/x.cu", "__device__ int x;", "outside"),
    ("feature-if", "src/tp/x.c", "#ifdef OPROJ_CUDA", "OPROJ_CUDA"),
    ("feature-if", "src/tp/x.c", "#ifndef HAVE_NCCL", "HAVE_NCCL"),
    ("feature-if", "src/tp/x.c", "#if defined(__cplusplus) || defined(HAVE_MPI)", "HAVE_MPI"),
    ("feature-if", "src/tp/x.c", "#if 0", "twin"),
    ("feature-if", "src/kernels/cuda/x.cu", "# elif CUDART_VERSION >= 12000", "CUDART_VERSION"),
    ("feature-if", "src/tp/x.c", "#if \\\n  OPROJ_MPI", "OPROJ_MPI"),
    ("prints", "src/tp/x.c", 'void x(void) { printf("x"); }', "printf()"),
    ("prints", "src/tp/x.c", 'void x(void) { puts ("x"); }', "puts()"),
    ("prints", "src/tp/x.c", "void x(void) { fflush(stdout); }", "stdout"),
    ("prints", "src/base/log.c", "void x(void) { fflush(stdout); }", "stdout"),
    ("prints", "src/kernels/cuda/x.cu", '__device__ void x() { printf("x"); }', "printf()"),
    ("stderr", "src/tp/x.c", 'void x(void) { fprintf(stderr, "x"); }', "base/log.c"),
    ("ends-process", "src/tp/x.c", "void x(void) { exit(1); }", "exit()"),
    ("ends-process", "src/tp/x.c", "void x(void) { abort(); }", "abort()"),
    ("ends-process", "src/tp/x.c", "void x(int a) { assert(a); }", "assert()"),
    ("columns", "launch/x.c", "/* " + "x" * 95 + " */", "101 columns"),
    ("columns", "cmake/x.cmake", "#" * 101, "101 columns"),
    ("columns", "tests/CMakeLists.txt", "#" * 101, "101 columns"),
    ("tab", "src/base/x.c", "\tint x;", "tab"),
    ("tab", "CMakeLists.txt", "\tset(X)", "tab"),
    ("blank", "src/base/x.c", "int x; ", "end of the line"),
    ("blank", "tests/unit/x.c", "int x;\r", "end of the line"),
    ("guard", "src/tp/x.h", "#ifndef OPROJ_X_H\n#define OPROJ_X_H\n#endif", "OPROJ_TP_X_H"),
    ("guard", "src/tp/x.h", "#ifndef OPROJ_TP_X_H\n#define OPROJ_TP_X\n#endif", "OPROJ_TP_X_H"),
    ("guard", "src/tp/x.h", "int x;", "OPROJ_TP_X_H"),
    ("guard", "launch/x.h", "#pragma once", "OPROJ_LAUNCH_X_H"),
    ("guard", "include/oproj/x.h", "int x;", "OPROJ_X_H"),
    ("guard", "tests/support/x.h", "int x;", "TESTS_SUPPORT_X_H"),
    ("guard", "src/kernels/cuda/x.cuh", "int x;", "OPROJ_KERNELS_CUDA_X_CUH"),
]

HARMLESS = [
    ("src/tp/x.c", 'int x(char *t) { return snprintf(t, 9, "printf(abort()) stdout"); }'),
    ("src/tp/x.c", "void f(const char *, ...) __attribute__((format(printf, 1, 2)));"),
    ("src/tp/x.c", "void x(struct ops *o) { o->abort(); o->table.exit(); }"),
    ("src/tp/x.c", '/* #include "weights/weights.h"\n#include <cuda.h>\n#if 0 */'),
    ("src/tp/x.c", '// #include "kernels/ref/ref.h"'),
    ("src/tp/x.c", "const char *x = \"/*\";\n#include <math.h>\nconst char *y = \"*/\";"),
    ("src/tp/x.c", '_Static_assert(sizeof(int) == 4, "abort()");'),
    ("src/kernels/cuda/x.cu", "#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900\n#endif"),
    ("src/base/x.c", "#ifdef __CUDACC__\n#else\n#endif"),
    ("src/kernels/cuda/x.cu", "#ifdef __CUDA_ARCH_FEAT_SM90_ALL\n#endif"),
    ("launch/x.c", "/* " + "\u00b5" * 94 + " */"),
]


def write(root, path, text):
    path = os.path.join(root, path)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8", newline="") as file:
        file.write(text)


def guarded(path, text):
    if not path.endswith(layering.HEADERS):
        return text
    guard = layering.guard_of(path)
    return f"#ifndef {guard}\n#define {guard}\n{text}#endif /* {guard} */\n"


class LayeringTest(unittest.TestCase):
    def lint(self, path=None, line=""):
        with tempfile.TemporaryDirectory() as root:
            for name, text in CLEAN.items():
                write(root, name, guarded(name, text))
            if path:
                # Two lines above, so that a line number is worth something.
                before = guarded(path, CLEAN[path]) if path in CLEAN else "\n\n"
                write(root, path, before + line + "\n")
                self.at = before.count("\n") + 1
            return layering.Lint(root).run()

    def test_clean_tree_is_clean(self):
        self.assertEqual(self.lint(), [])

    def test_each_violation_is_found_where_it_is(self):
        for rule, path, line, word in VIOLATIONS:
            with self.subTest(rule=rule, path=path, line=line):
                found = self.lint(path, line)
                self.assertEqual([(f[0], f[2]) for f in found], [(path, rule)])
                self.assertIn(word, found[0][3])
                if rule not in ("guard", "cu-place"):
                    self.assertEqual(found[0][1], self.at)

    def test_harmless_lines_are_let_be(self):
        for path, line in HARMLESS:
            with self.subTest(path=path, line=line):
                self.assertEqual(self.lint(path, line), [])

    def test_every_rule_has_a_violation_here(self):
        with open(layering.__file__, encoding="utf-8") as file:
            source = file.read()
        named = set(layering.re.findall(r'self\.add\("([a-z-]+)",', source)) - {"empty"}
        named |= {"library-" + name for name, _, _ in layering.LIBRARIES}
        self.assertEqual(named, {rule for rule, _, _, _ in VIOLATIONS})

    def test_a_tree_without_sources_is_refused(self):
        with tempfile.TemporaryDirectory() as root:
            self.assertEqual([f[2] for f in layering.Lint(root).run()], ["empty"])

    def test_guard_names(self):
        for path, guard in (("include/oproj.h", "OPROJ_H"),
                            ("include/oproj/mpi.h", "OPROJ_MPI_H"),
                            ("src/base/num.h", "OPROJ_BASE_NUM_H"),
                            ("src/kernels/kernels.h", "OPROJ_KERNELS_H"),
                            ("src/kernels/ref/ref.h", "OPROJ_KERNELS_REF_H"),
                            ("src/kernels/cuda/device.cuh", "OPROJ_KERNELS_CUDA_DEVICE_CUH"),
                            ("launch/args.h", "OPROJ_LAUNCH_ARGS_H"),
                            ("tests/support/files.h", "TESTS_SUPPORT_FILES_H")):
            self.assertEqual(layering.guard_of(path), guard)


if __name__ == "__main__":
    unittest.main()
