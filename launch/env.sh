# env.sh - the environment of an oproj job, to be sourced by scripts that start one: every variable
# that oproj reads or that helps it, why, and what it is when nobody sets it.  What is set already
# stays.  Ranks must agree on those marked *; oproj refuses to start where they do not, and where one
# of its own holds no value named here.  Of others that begin with OPROJ_ it warns.

# ---- oproj ---------------------------------------------------------------------------------------

# Lines on stderr: error, warn (default), info (placement, paths, phases) or debug.
: "${OPROJ_LOG:=warn}"

# * Seconds, up to 1e6, that ranks wait for one that is silent or late before they end the job; 0 waits
# for ever.
# 30 is more than any pause of a healthy rank and less than a person's patience.
: "${OPROJ_DEADLINE:=30}"

# * 0 leaves ranks where their launcher has bound them.  With 1 a rank moves to the CPUs and memory near
# its GPU, or, without a GPU, from the one core that mpirun gives one or two ranks to its share.
: "${OPROJ_BIND:=1}"

# * 1: GPUs of one host write few tokens' sums straight to one another's memory, in one launch,
# instead of through NCCL.  0 (off), as it has not run on several GPUs yet.
: "${OPROJ_PUSH:=0}"

# 0: every kernel waits for the one before it to end, instead of setting out early and waiting for it
# when it needs its results.  For finding faults: the results are the same, decode takes longer.
: "${OPROJ_PDL:=1}"

export OPROJ_LOG OPROJ_DEADLINE OPROJ_BIND OPROJ_PUSH OPROJ_PDL

# OPROJ_TERMINAL: 0 or 1; not set here.  oproj-run sets it to 1 where its own stderr is a terminal, as its
# ranks see only a pipe; a bar then shows how loading goes.

# ---- threads -------------------------------------------------------------------------------------

# OMP_NUM_THREADS: host threads of a rank (backend ref, tables).  Not set here: oproj shares the CPUs
# that a rank may use among the ranks of the host, and a number from somebody's profile would not.

# ---- CUDA ----------------------------------------------------------------------------------------

# * Kernels load when the library does, not at their first launch: a first launch that waits for the
# device can stop ranks that wait for each other.
: "${CUDA_MODULE_LOADING:=EAGER}"
export CUDA_MODULE_LOADING

# CUDA_VISIBLE_DEVICES: not set here.  oproj deals the GPUs that a host's ranks see in order; a
# launcher that shows each rank one GPU of its own is understood as well.

# ---- NCCL ----------------------------------------------------------------------------------------

# * Sums are few kilobytes and in a fixed order of ranks; the switch's own sums would add in another.
: "${NCCL_NVLS_ENABLE:=0}"
# NCCL says why it fails.
: "${NCCL_DEBUG:=WARN}"
export NCCL_NVLS_ENABLE NCCL_DEBUG

# NCCL_SOCKET_IFNAME: the interface through which ranks of several hosts meet; set it where a host
# has some that the others cannot reach.  oproj names it when NCCL's ranks do not meet.

# ---- Open MPI ------------------------------------------------------------------------------------

# Containers often run as root and seldom allow one process to copy from another's memory, which
# Open MPI then complains about at every start.
if [ "$(id -u)" -eq 0 ]; then
  export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi
: "${OMPI_MCA_btl_vader_single_copy_mechanism:=none}"
export OMPI_MCA_btl_vader_single_copy_mechanism

# mpirun notices after some 10 s that another host is cut off, in place of 5 minutes.  It has to be
# sooner than OPROJ_DEADLINE: once a rank has left, mpirun talks to that host and waits for TCP.
: "${OMPI_MCA_oob_tcp_keepalive_time:=5}"
: "${OMPI_MCA_oob_tcp_keepalive_intvl:=2}"
: "${OMPI_MCA_oob_tcp_keepalive_probes:=3}"
export OMPI_MCA_oob_tcp_keepalive_time OMPI_MCA_oob_tcp_keepalive_intvl
export OMPI_MCA_oob_tcp_keepalive_probes

# mpirun now and then closes the socket of a rank that leaves before it has told epoll (3 of 210 refusals
# on 8 ranks), and libevent complains on stderr beside oproj's one sentence.  poll has not to be told.
: "${EVENT_NOEPOLL:=1}"
export EVENT_NOEPOLL
